"""Make the demo checkpoint: a small GPT-J trained on Debian's copies of free documentation.

Three steps, each a subcommand. `corpus` reads the files of four Debian 12 packages that must be
installed (python3.11-doc, libpython3.11-stdlib with -minimal, sqlite3-doc, postgresql-doc-15) and
splits them by file into training, calibration and held-out text. `tokenizer` trains a byte-level
BPE on the training text. `train` trains the model, keeps the weights with the best held-out
perplexity and writes a Hugging Face GPT-J directory in float16, with a JSON report beside it.

    apt-get install python3.11-doc libpython3.11-stdlib sqlite3-doc postgresql-doc-15
    pip install torch transformers tokenizers safetensors beautifulsoup4
    python tools/train_demo.py corpus --out corpus
    python tools/train_demo.py tokenizer --train corpus/train.txt.xz --out demo
    python tools/train_demo.py train --train corpus/train.txt.xz --heldout corpus/heldout.txt \
        --tokenizer demo --out demo --report report.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

END = "<|endoftext|>"
END_ID = 0  # special tokens come first in the vocabulary
VOCAB = 3072
WINDOW = 512
LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out")

# source -> (packages, folder that the files must lie in, suffix)
SOURCES = {
    "python-docs": ("python3.11-doc", "/usr/share/doc/python3.11/html/_sources/", ".rst.txt"),
    "python-stdlib": ("libpython3.11-stdlib libpython3.11-minimal", "/usr/lib/python3.11/", ".py"),
    "sqlite-docs": ("sqlite3-doc", "/usr/share/doc/sqlite3/", ".html"),
    "postgresql-docs": ("postgresql-doc-15", "/usr/share/doc/postgresql-doc-15/html/", ".html"),
}
# Tests, tables, Debian's own additions, indexes, and pages that repeat the text of other pages.
LEAVE_OUT = re.compile(
    r"/(test|tests|lib2to3|idlelib|ensurepip)/|/pydoc_data/topics|/_sysconfigdata|/this\.py"
    r"|/html/entities|/stringprep|/re/_casefix|/sitecustomize|/_distutils_system_mod"
    r"|/releaselog/|/search\.d/|_crossref|/requirements\.|/keyword_index|/sitemap|/doclist|/bookindex"
)
HELDOUT_BYTES = 235_000  # per source
CALIBRATION_BYTES = 200_000  # per source
SPLIT_FILE_BYTES = (1_500, 48_000)  # only files of these sizes are held out or used to calibrate
BLOCKS = re.compile(r"p|div|pre|table|tr|d[tdl]|li|[uo]l|h[1-6r]|blockquote|br|section")


def say(message: str) -> None:
    """Write one line of progress to stderr."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def read_text(path: Path) -> str:
    """Read UTF-8 text, through xz where the name says so."""
    data = path.read_bytes()
    return (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")


def package_files(source: str) -> list[Path]:
    """List the source's regular files, as the installed packages name them."""
    packages, folder, suffix = SOURCES[source]
    listing = ["dpkg", "-L", *packages.split()]
    names = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split("\n")
    kept = {n for n in names if n.startswith(folder) and n.endswith(suffix)}
    paths = [Path(n) for n in sorted(kept) if not LEAVE_OUT.search(n)]
    return [p for p in paths if p.is_file() and not p.is_symlink()]


def html_to_text(page: str) -> str:
    """Turn an HTML page into plain text: one line a block, <pre> left as it is."""
    from bs4 import BeautifulSoup
    from bs4.element import NavigableString, PreformattedString, Tag

    soup = BeautifulSoup(page, "html.parser")
    for tag in soup.select("head, script, style, form, svg, .navheader, .navfooter, .nosearch"):
        tag.decompose()
    out: list[str] = []

    def walk(node: Tag, pre: bool) -> None:
        for child in node.children:
            if isinstance(child, Tag):
                block = BLOCKS.fullmatch(child.name) is not None
                out.append("\n" if block else " " if child.name in {"td", "th"} else "")
                walk(child, pre or child.name == "pre")
                out.append("\n" if block else "")
            elif isinstance(child, NavigableString) and not isinstance(child, PreformattedString):
                # NUL keeps the indentation of <pre> through the clean-up below
                out.append(child.replace(" ", "\0") if pre else re.sub(r"\s+", " ", child))

    walk(soup, pre=False)
    text = re.sub(r" +", " ", "".join(out).replace("\xa0", " "))
    return re.sub(r" ?\n ?", "\n", text).replace("\0", " ")


def clean(data: bytes, html: bool) -> str | None:
    """Return the file's text, or None where it is not UTF-8 text worth reading."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if html:
        text = html_to_text(text)
    text = text.replace("\r\n", "\n").replace("\ufeff", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    letters = sum(c.isalpha() for c in text)
    odd = sum(not (c.isprintable() or c in "\n\t\f") for c in text)
    table = "decoding_table = (" in text or "decoding_map.update(" in text
    if len(text) < 200 or odd > len(text) / 1000 or letters < 0.4 * len(text) or table:
        return None
    return None if END in text else text


def without_duplicates(documents: dict[Path, str]) -> dict[Path, str]:
    """Drop documents of which most 8-word runs stand in a longer document (exact copies too)."""
    seen: set[int] = set()
    kept: dict[Path, str] = {}
    for path, text in sorted(documents.items(), key=lambda item: (-len(item[1]), item[0])):
        words = text.split()
        runs = {hash(tuple(words[i : i + 8])) for i in range(max(len(words) - 7, 1))}
        if len(runs & seen) <= 0.5 * len(runs):
            kept[path] = text
            seen |= runs
    return kept


def path_hash(path: Path) -> str:
    """Order files independently of their names, the same on every machine."""
    return hashlib.sha256(str(path).encode()).hexdigest()


def split(documents: dict[Path, str]) -> dict[str, list[Path]]:
    """Split one source by file: in the order of the hashes, fill held-out, then calibration."""
    parts: dict[str, list[Path]] = {"heldout": [], "calibration": [], "train": []}
    room = {"heldout": HELDOUT_BYTES, "calibration": CALIBRATION_BYTES}
    for path in sorted(documents, key=path_hash):
        size = len(documents[path].encode())
        fits = SPLIT_FILE_BYTES[0] <= size <= SPLIT_FILE_BYTES[1]
        name = next((n for n in room if fits and size <= room[n]), "train")
        parts[name].append(path)
        if name in room:
            room[name] -= size
    return parts


def corpus(args: argparse.Namespace) -> None:
    """Build the three texts and a manifest that names each file of each split."""
    args.out.mkdir(parents=True, exist_ok=True)
    owner: dict[Path, str] = {}
    documents: dict[Path, str] = {}
    for source in SOURCES:
        for path in package_files(source):
            text = clean(path.read_bytes(), html=path.suffix == ".html")
            if text is not None:
                documents[path], owner[path] = text, source
        say(f"{source}: {sum(s == source for s in owner.values())} files read")
    kept = without_duplicates(documents)
    say(f"{len(documents) - len(kept)} duplicates dropped, {len(kept)} documents kept")

    splits: dict[str, list[Path]] = {"train": [], "calibration": [], "heldout": []}
    for source in SOURCES:
        parts = split({p: t for p, t in kept.items() if owner[p] == source})
        for name, paths in parts.items():
            splits[name] += paths
            size = sum(len(kept[p].encode()) for p in paths)
            say(f"{source}: {name}: {len(paths)} files, {size} bytes")
    for name, paths in splits.items():
        paths.sort(key=path_hash)
        text = f"\n{END}\n".join(kept[p] for p in paths) + "\n"
        packed = name == "train"
        data = lzma.compress(text.encode()) if packed else text.encode()
        (args.out / f"{name}.txt{'.xz' if packed else ''}").write_bytes(data)
        say(f"{name}: {len(paths)} files, {len(text.encode())} bytes")
    manifest = {name: sorted(map(str, paths)) for name, paths in splits.items()}
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def tokenizer(args: argparse.Namespace) -> None:
    """Train the byte-level BPE and write it the way transformers' AutoTokenizer reads it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(read_text(args.train).split(END), trainer)
    args.out.mkdir(parents=True, exist_ok=True)
    bpe.save(str(args.out / "tokenizer.json"))
    settings: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": WINDOW}
    settings |= {"add_prefix_space": False, "clean_up_tokenization_spaces": False}
    (args.out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    say(f"vocabulary: {bpe.get_vocab_size()}, {END} is {bpe.token_to_id(END)}")


def encode(tokenizer_folder: Path, text: str) -> torch.Tensor:
    """Encode a whole text, document by document (special tokens split the text the same way)."""
    bpe = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    ids: list[int] = []
    for encoding in bpe.encode_batch(text.split(END)):
        ids += [*encoding.ids, END_ID]
    return torch.tensor(ids[:-1])


def use_fused_attention(model: Any) -> None:
    """Give GPT-J PyTorch's fused causal attention, where this transformers has only its own."""

    def attend(query: Any, key: Any, value: Any, _mask: Any = None) -> tuple[Any, None]:
        query, key = query.to(value.dtype), key.to(value.dtype)  # scaled by 1 / sqrt(head size)
        return scaled_dot_product_attention(query, key, value, is_causal=True), None

    for block in model.transformer.h:
        if hasattr(block.attn, "_attn"):
            block.attn._attn = attend  # noqa: SLF001 (the only place to put it)


def perplexity(model: Any, ids: Any, batch: int = 32) -> float:
    """exp of the mean loss over consecutive windows of 512 tokens, the last one shorter."""
    whole = len(ids) // WINDOW * WINDOW
    batches = list(ids[:whole].view(-1, WINDOW).split(batch))
    if len(ids) - whole > 1:
        batches.append(ids[whole:].view(1, -1))
    total, count = 0.0, 0
    with torch.no_grad():
        for x in batches:
            logits = model(input_ids=x, use_cache=False).logits[:, :-1].float().flatten(0, 1)
            total += cross_entropy(logits, x[:, 1:].flatten(), reduction="sum").item()
            count += x.shape[0] * (x.shape[1] - 1)
    return math.exp(total / count)


def round_to_nearest(model: Any, bits: int, group: int = 128) -> None:
    """Round the block linears, in place, to asymmetric `bits`-bit groups along the input."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.rsplit(".", 1)[-1] in LINEARS:
                w = module.weight.view(module.weight.shape[0], -1, group)
                low = w.amin(-1, keepdim=True).clamp(max=0)
                high = w.amax(-1, keepdim=True).clamp(min=0)
                scale = ((high - low) / (2**bits - 1)).clamp(min=1e-8)
                zero = (-low / scale).round()
                q = ((w / scale).round() + zero).clamp(0, 2**bits - 1)
                w.copy_((q - zero) * scale)


def new_model(args: argparse.Namespace) -> Any:
    """Build the model with fresh weights, the residual outputs scaled down by depth."""
    torch.manual_seed(args.seed)
    shape: dict[str, Any] = {"vocab_size": VOCAB, "n_positions": WINDOW, "rotary_dim": 32}
    shape |= {"n_embd": 384, "n_layer": 4, "n_head": 6}  # the rest is GPT-J's own
    ends: dict[str, Any] = {"bos_token_id": END_ID, "eos_token_id": END_ID}
    drops: dict[str, Any] = {"resid_pdrop": args.dropout, "embd_pdrop": args.dropout}
    config = transformers.GPTJConfig(**shape, **ends, **drops)
    model = transformers.GPTJForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("out_proj.weight", "fc_out.weight")):
                weight.mul_(1 / math.sqrt(2 * config.n_layer))
    return model


def fit(args: argparse.Namespace, model: Any, ids: Any, check: Any) -> dict[str, Any]:
    """Train, and leave the weights that did best on `check` in the model."""
    device = ids.device
    matrices = {"params": [p for p in model.parameters() if p.dim() > 1]}
    vectors = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(
        [matrices, vectors], lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay
    )
    run = torch.compile(model, dynamic=False) if args.compile else model
    dice = torch.Generator().manual_seed(args.seed)
    windows = (len(ids) - WINDOW - 1) // WINDOW
    per_epoch = windows // args.batch
    steps = args.steps or int(args.epochs * per_epoch)
    reach = torch.arange(WINDOW + 1, device=device)
    best: tuple[float, int, dict[str, Any]] = (math.inf, 0, {})
    history: list[list[float]] = []
    start, step, done = time.monotonic(), 0, 0.0
    starts = torch.empty(0, dtype=torch.int64)
    while done < 1.0:
        if len(starts) < args.batch:  # a new epoch: every window once, from a new offset
            offset = torch.randint(WINDOW, (1,), generator=dice)
            starts = torch.randperm(windows, generator=dice) * WINDOW + offset
        first, starts = starts[: args.batch].to(device), starts[args.batch :]
        x = ids[first[:, None] + reach]
        for group in optimizer.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * done))
            group["lr"] = args.lr * min(1.0, (step + 1) / args.warmup) * cosine
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = run(input_ids=x[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0:
            loss.item()  # so that the clock tells the device's time, not the queue's
        done = max(step / steps, (time.monotonic() - start) / (60 * args.minutes))
        if step % args.check_every == 0 or done >= 1.0:
            model.eval()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                score = perplexity(model, check)
            model.train()
            history.append([step, round(loss.item(), 4), round(score, 4)])
            seconds = time.monotonic() - start
            say(f"step {step}/{steps} {seconds:.0f} s loss {loss.item():.4f} held-out {score:.4f}")
            if score < best[0]:
                best = (score, step, {k: v.clone() for k, v in model.state_dict().items()})
    model.load_state_dict(best[2])
    report = {"steps": step, "best_step": best[1], "tokens_seen": step * args.batch * WINDOW}
    report |= {"epochs": round(step / per_epoch, 2), "seconds": round(time.monotonic() - start, 1)}
    return report | {"history": history}


def save(model: Any, out: Path) -> None:
    """Write the float16 directory; the configuration names the type in both of its spellings."""
    model.config.resid_pdrop = model.config.embd_pdrop = 0.0
    model.half().save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text()) | {"dtype": "float16", "torch_dtype": "float16"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def train(args: argparse.Namespace) -> None:
    """Train, save, then measure what was saved."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = encode(args.tokenizer, read_text(args.train)).to(device)
    heldout = encode(args.tokenizer, read_text(args.heldout))[: args.heldout_tokens].to(device)
    say(f"{len(ids)} training tokens, {len(heldout)} held-out tokens")
    model = new_model(args).to(device)
    check = heldout[: len(heldout) // WINDOW * WINDOW].view(-1, WINDOW)[::4].flatten()
    use_fused_attention(model)
    report = fit(args, model, ids, check)
    save(model, args.out)
    report["heldout_tokens"] = len(heldout)
    report["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    report |= {"torch": torch.__version__, "transformers": transformers.__version__}
    report |= {"parameters": sum(p.numel() for p in model.parameters()), "train_tokens": len(ids)}
    report |= {"settings": {k: v for k, v in vars(args).items() if isinstance(v, int | float)}}
    for name, bits in (("fp16", 0), ("rtn4_g128", 4), ("rtn3_g128", 3)):
        loaded = transformers.GPTJForCausalLM.from_pretrained(args.out, dtype=torch.float32)
        model = loaded.to(device).eval()
        if bits:
            round_to_nearest(model, bits)
        report[f"perplexity_{name}"] = round(perplexity(model, heldout, batch=8), 4)
    args.report.write_text(json.dumps(report, indent=1) + "\n")
    say(json.dumps({k: v for k, v in report.items() if k != "history"}))


def main() -> None:
    """Read the command line and run one step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("corpus", help="build and split the text")
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(run=corpus)
    two = commands.add_parser("tokenizer", help="train the tokenizer")
    two.add_argument("--train", type=Path, required=True)
    two.add_argument("--out", type=Path, required=True)
    two.set_defaults(run=tokenizer)
    three = commands.add_parser("train", help="train and measure the model")
    for name in ("train", "heldout", "tokenizer", "out", "report"):
        three.add_argument(f"--{name}", type=Path, required=True)
    numbers = {"epochs": 120.0, "minutes": 7.5, "lr": 2e-3, "weight-decay": 0.3, "dropout": 0.25}
    counts = {"batch": 64, "warmup": 400, "check-every": 500, "seed": 0, "steps": 0}
    for name, default in (numbers | counts | {"heldout-tokens": 10**9}).items():
        three.add_argument(f"--{name}", type=type(default), default=default)
    three.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    three.set_defaults(run=train)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
