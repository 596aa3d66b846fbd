"""Tokens per second of edge_rt and of other libraries, on the same checkpoint and CPU.

Every engine continues the same passages of the held-out text, greedily and with no early stop, one
at a time (b1) and eight at once (b8). Tokens per second are the new tokens of all rows over the
wall time of the whole call, prefill included; a decode step is what the call takes beyond the same
call for one new token, for each further token. Loading is not measured. An engine runs in a process
of its own, which tries every setting; the engines take turns, so that a busy spell of the machine
hits all alike, and of each setting the fastest call counts.

edge_rt works in INT4 through its loop and sampler, transformers in float32, torch_int8 is the same
model after torch's dynamic quantization of its linears, CTranslate2 works in int8. `agreement` is
the share of the first 8 tokens that are those of transformers, as proof that all run one model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import util
from pathlib import Path
from typing import Any

import tokenizers
from origin import cpu_facts, origin
from peer_engines import Row, Tokens, settings_of
from peer_table import ORACLE, OURS, busy, lines, merged, table

from edge_rt import recipes
from edge_rt.bench.workloads import held_out_prompts
from edge_rt.bundle import Bundle
from edge_rt.cli.output import STDOUT, check_json_target, finish, positive
from edge_rt.errors import ConfigError, EdgeRTError, EngineError
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.gptj import ModelConfig
from edge_rt.runtime.ort import usable_cores
from edge_rt.tokenizer import TOKENIZER_FILE, Tokenizer

ROOT = Path(__file__).parent.parent
# Engine -> the modules that it needs beside edge_rt.
NEEDS: dict[str, tuple[str, ...]] = {
    OURS: (),
    ORACLE: ("torch", "transformers"),
    "torch_int8": ("torch", "transformers"),
    "ctranslate2": ("ctranslate2", "torch", "transformers"),  # the latter two to convert
}
PEERS = tuple(name for name in NEEDS if name != OURS)
CALLS = {1: 4, 8: 2}  # rows of a call -> calls of a turn
CHECK_PROMPTS, CHECK_TOKENS = 32, 8
LIBRARIES = ("onnxruntime", "numpy", "torch", "transformers", "ctranslate2")


def missing(engine: str) -> str | None:
    """What is missing for an engine; None if nothing is."""
    names = " ".join(name for name in NEEDS[engine] if util.find_spec(name) is None)
    if not names:
        return None
    return f"not installed: {names}; install: {sys.executable} -m pip install {names}"


def environment(vendor: str) -> dict[str, str]:
    """For the engines' processes: nothing is fetched; and ctranslate2's best library."""
    found = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # MKL takes its slow paths on other vendors' CPUs; oneDNN then does the same work.
    return found | ({} if vendor == "GenuineIntel" else {"CT2_USE_MKL": "0"})


def convertible(checkpoint: Path, vocab_size: int, view: Path) -> Path:
    """The checkpoint, or a view of it whose tokenizer has a token for every row of the embedding.

    ctranslate2 refuses a model with more rows than tokens, as gptj_cut makes them.
    """
    inner = tokenizers.Tokenizer.from_file(str(checkpoint / TOKENIZER_FILE))
    short = vocab_size - inner.get_vocab_size()
    if short <= 0:
        return checkpoint
    view.mkdir()
    for file in checkpoint.resolve().iterdir():
        if file.name != TOKENIZER_FILE:
            (view / file.name).symlink_to(file)
    inner.add_tokens([f"<filler-{index}>" for index in range(short)])
    inner.save(str(view / TOKENIZER_FILE))
    return view


class Bench:
    """The engines' processes, the directory that they work in, and what they have found.

    `turns`: of each engine that is still in, the rows of each turn; `first`: its first tokens, by
    batch size; `left_out`: why the others are not in.
    """

    def __init__(self, options: argparse.Namespace, vendor: str, work: Path) -> None:
        self._options, self._work = options, work
        self._config = Checkpoint.open(options.checkpoint).config
        check_context(options, self._config.n_positions, options.checkpoint)
        self.bundle: Path = options.bundle or work / "bundle"
        self._prompts = held_out_prompts(
            Tokenizer.load(options.checkpoint),
            max(CALLS) if options.quick else CHECK_PROMPTS,
            options.prompt_tokens,
        )
        # Whatever the caller's shell says, the threads are those of the settings.
        dropped = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        self._environment = kept | environment(vendor)
        self.left_out = {name: why for name in options.peers if (why := missing(name))}
        engines = [name for name in (OURS, *options.peers) if name not in self.left_out]
        self.turns: dict[str, list[list[Row]]] = {name: [] for name in engines}
        self.first: dict[str, dict[str, Tokens]] = {}

    def each(self, part: Callable[[str], None]) -> None:
        """Every engine does its part; a peer that fails is left out, ours must not."""
        for engine in list(self.turns):
            try:
                part(engine)
            except EngineError as error:
                if engine == OURS:
                    raise
                say(f"{engine} is left out: {error}")
                self.left_out[engine] = str(error)
                del self.turns[engine]
                self.first.pop(engine, None)

    def prepare(self, engine: str) -> None:
        """Make what an engine loads in place of the checkpoint."""
        options, work = self._options, self._work
        if engine == OURS:
            if not options.bundle:
                say("quantizing and building: give --bundle if there is one")
                command, quantized = ["-m", "edge_rt"], str(work / "quantized")
                what = [str(options.checkpoint), "--recipe", options.quant_recipe]
                self._python(*command, "quantize", *what, "--out", quantized)
                what = [quantized, "--recipe", "demo.cpu"]
                self._python(*command, "build", *what, "--out", str(self.bundle))
            check_fit(Bundle.load(self.bundle), self._config, options)
        elif engine == "ctranslate2":
            say("converting for ctranslate2")
            source = convertible(options.checkpoint, self._config.vocab_size, work / "source")
            what = ["--model", str(source), "--output_dir", str(work / engine)]
            what += ["--quantization", "int8"]
            self._python("-m", "ctranslate2.converters.transformers", *what)

    def take_turn(self, engine: str) -> None:
        """Every setting of an engine once; in its first turn its first tokens too."""
        options, job, out = self._options, self._work / "job.json", self._work / "out.json"
        say(f"turn {len(self.turns[engine]) + 1} of {options.repeats}: {engine}")
        settings = settings_of(engine, usable_cores(), platform.machine())
        what = {
            "engine": engine,
            "checkpoint": str(options.checkpoint),
            "made": str(self.bundle if engine == OURS else self._work / engine),
            "settings": settings[:1] if options.quick else settings,
            "calls": list(CALLS.items()),
            "prompts": self._prompts,
            "new_tokens": options.new_tokens,
            "check_tokens": 0 if self.turns[engine] else CHECK_TOKENS,
        }
        job.write_text(json.dumps(what), encoding="utf-8")
        self._python(str(ROOT / "tools/peer_engines.py"), str(job), str(out))
        found = json.loads(out.read_text("utf-8"))
        self.turns[engine].append(found["rows"])
        if found["first"]:
            self.first[engine] = found["first"]

    def _python(self, *command: str) -> None:
        """Run it, quietly; EngineError with its last words if it failed."""
        done = subprocess.run(
            [sys.executable, *command],
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise EngineError(f"{' '.join(command[:3])}: exit status {done.returncode}: {last}")


def check_context(options: argparse.Namespace, capacity: int, holder: Path) -> None:
    """ConfigError if prompt and new tokens do not fit."""
    tokens = options.prompt_tokens + max(options.new_tokens, CHECK_TOKENS)
    if tokens > capacity:
        raise ConfigError(
            f"prompt and new tokens are {tokens} in all, {holder} holds {capacity}; "
            f"lower --prompt-tokens or --new-tokens"
        )


def check_fit(bundle: Bundle, config: ModelConfig, options: argparse.Namespace) -> None:
    """ConfigError unless the bundle is of this checkpoint's sizes and holds what is asked of it."""
    model, limits, rows = bundle.manifest.model, bundle.manifest.limits(), max(CALLS)
    for name in ("n_layer", "n_head", "head_size", "vocab_size", "n_positions"):
        found, expected = getattr(model, name), getattr(config, name)
        if found != expected:
            raise ConfigError(
                f"{bundle.path} has {name} {found}, {options.checkpoint} has {expected}; "
                f"give a bundle that was built from this checkpoint"
            )
    if limits.max_rows < rows:
        raise ConfigError(
            f"{bundle.path} serves {limits.max_rows} requests at once, {rows} are measured; "
            f"raise max_batch in the engine recipe and build again"
        )
    check_context(options, limits.max_context, bundle.path)


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The keys of `tools/peers --json`."""
    facts = cpu_facts()
    vendor = facts.get("vendor_id", "")
    load_before, loads = os.getloadavg()[0], []
    bench = Bench(options, vendor, work)
    bench.each(bench.prepare)
    for _ in range(options.repeats):
        loads.append(os.getloadavg()[0])
        bench.each(bench.take_turn)
    found = table({name: merged(turns) for name, turns in bench.turns.items()}, bench.first)
    found["warnings"] += busy(load_before)
    return {
        **found,
        "left_out": bench.left_out,
        **origin(facts, LIBRARIES),
        "environment": environment(vendor),
        "edge_rt_recipe": asdict(Bundle.load(bench.bundle).manifest.recipe),
        "load_average_before": load_before,
        "load_average_by_turn": loads,  # from the second on, most of it is this run's own
        "checkpoint": options.checkpoint.name,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "repeats": options.repeats,
    }


def say(line: str) -> None:
    """Progress."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Progress on stderr, the table or one JSON object on stdout."""
    parser = argparse.ArgumentParser(
        prog="tools/peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo = recipes.data_dir("engines") / "demo"
    parser.add_argument("--checkpoint", type=Path, default=demo, metavar="DIR")
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="of the checkpoint (default: one is made)"
    )
    parser.add_argument("--quant-recipe", default="demo", metavar="NAME|FILE")
    parser.add_argument("--prompt-tokens", type=positive, default=32, metavar="N")
    parser.add_argument("--new-tokens", type=positive, metavar="N", help="(default 64, quick: 8)")
    parser.add_argument("--repeats", type=positive, metavar="N", help="turns (default 3, quick: 1)")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--quick", action="store_true", help="only each engine's first setting")
    parser.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE")
    options = parser.parse_args(arguments)
    options.new_tokens = options.new_tokens or (8 if options.quick else 64)
    options.repeats = options.repeats or (1 if options.quick else 3)
    try:
        if options.new_tokens < 2:
            raise ConfigError("--new-tokens must be 2 or more: a decode step is measured")
        check_json_target(options)
        with tempfile.TemporaryDirectory() as work:
            found = measure(options, Path(work))
        finish(options, found)
    except EdgeRTError as error:
        sys.stderr.write(f"tools/peers: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    if options.json != STDOUT:
        sys.stdout.write("\n".join(lines(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
