"""`edge-rt eval`: perplexity of a checkpoint or bundle on a text, alone or against another."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edge_rt.cli.output import Commands, add_command, finish, positive, say
from edge_rt.errors import CheckpointError, ConfigError
from edge_rt.storage import read_text

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from edge_rt.bench.perplexity import FloatModel, Score
    from edge_rt.bundle import Bundle
    from edge_rt.model.device import Device, DeviceName

_PROTOCOL = """\
The text is encoded whole with the target's own tokenizer and cut into windows without overlap; a
remainder is dropped. Within a window each token but the first is predicted from those before it.
Perplexity is exp of the mean negative log-likelihood over all predicted tokens. With --against,
greedy agreement is the share of predicted positions at which both targets' most likely next token
is the same, both fed with the text. Intervals are 95 % percentile bootstraps over windows (1,000
resamples, fixed seed); the difference of two targets is resampled in pairs. Checkpoints compute in
float32; a bundle runs on the engine that it was built for."""


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = add_command(
        commands, "eval", "Measure the perplexity of a checkpoint or bundle on a text.", run
    )
    parser.epilog = _PROTOCOL
    target = "a Hugging Face checkpoint, a quantized checkpoint or a bundle"
    parser.add_argument("target", type=Path, metavar="TARGET", help=target)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--against", type=Path, metavar="TARGET", help="compare with this one")
    parser.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help="tokens of a window (default: all that every target can take)",
    )
    parser.add_argument(
        "--tokens", type=positive, metavar="N", help="take the first N tokens of the text"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where checkpoints compute (default cpu)",
    )


def run(options: argparse.Namespace) -> int:
    """Evaluate and report."""
    result = evaluate(
        options.target,
        options.text,
        against=options.against,
        context=options.context,
        tokens=options.tokens,
        device=options.device,
    )
    for line in lines(result):
        say(options, line)
    finish(options, result)
    return 0


def evaluate(
    target: Path,
    text: Path,
    *,
    against: Path | None = None,
    context: int | None = None,
    tokens: int | None = None,
    device: DeviceName = "cpu",
) -> dict[str, Any]:
    """The command's table. What can be wrong with the settings is found before the first score."""
    from edge_rt.bench.perplexity import agreement, difference, windows
    from edge_rt.model.device import Device

    content = read_text(text, "--text")
    if not content:
        raise ConfigError(f"--text {text} is empty; give a text of at least one window")
    targets = [_open(path) for path in (target, against) if path is not None]
    if device != "cpu" and all(each.kind == "bundle" for each in targets):
        raise ConfigError(
            f"--device {device}: {target} is a bundle, which runs on the engine that it was built "
            f"for; leave --device out"
        )
    place = Device.open(device)
    ids = _tokens(targets, content)
    if tokens is not None and tokens > len(ids):
        raise ConfigError(
            f"--tokens {tokens}: {text} has {len(ids)} tokens; give fewer, or leave it out"
        )
    cut = windows(ids[:tokens], _context(targets, context))
    scored = [_score(each, cut, place) for each in targets]
    table = scored[0].table
    if against is not None:
        first, second = (each.score for each in scored)
        found, interval = difference(first, second)
        table |= {
            "against": scored[1].table,
            "perplexity_difference": found,
            "perplexity_difference_ci95": interval,
            "greedy_agreement": agreement(first, second),
        }
    return table


@dataclass(frozen=True, slots=True)
class _Target:
    """What is to be scored: `source` by its `kind`."""

    path: Path
    kind: Literal["checkpoint", "quantized", "bundle"]
    source: FloatModel | Bundle
    vocab_size: int
    max_context: int

    def encode(self, content: str) -> list[int]:
        """`content` with the target's own tokenizer; CheckpointError if its ids do not fit."""
        from edge_rt.tokenizer import encode_for

        return encode_for(self.path, self.vocab_size, content)


@dataclass(frozen=True, slots=True)
class _Scored:
    """A target's score and its part of the table."""

    score: Score
    table: dict[str, Any]


def _open(path: Path) -> _Target:
    """A bundle, a quantized checkpoint or a float checkpoint, by the file that marks it."""
    from edge_rt.bench import perplexity
    from edge_rt.bundle import MANIFEST, Bundle
    from edge_rt.model.checkpoint import Checkpoint
    from edge_rt.quant.scheme import is_packed
    from edge_rt.quant.store import MARKER, QuantizedCheckpoint

    if (path / MANIFEST).is_file():
        bundle = Bundle.load(path)
        perplexity.require_arithmetic(bundle)
        limits = bundle.manifest.limits()
        return _Target(path, "bundle", bundle, limits.vocab_size, limits.max_context)
    if (path / MARKER).is_file():
        quantized = QuantizedCheckpoint.open(path)
        quantized.check_files()
        config = quantized.info.model
        source: FloatModel = perplexity.of_quantized(quantized)
        return _Target(path, "quantized", source, config.vocab_size, config.n_positions)
    if (path / "config.json").is_file():
        if is_packed(path):
            raise ConfigError(
                f"{path} was quantized by AWQ or GPTQ; take it over with edge-rt quantize {path} "
                f"--out DIR, then evaluate DIR"
            )
        checkpoint = Checkpoint.open(path)
        config = checkpoint.config
        source = perplexity.of_checkpoint(checkpoint)
        return _Target(path, "checkpoint", source, config.vocab_size, config.n_positions)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; give a checkpoint or a bundle")
    raise CheckpointError(
        f"{path} holds neither config.json (of a Hugging Face checkpoint) nor {MARKER} (of a "
        f"quantized one) nor {MANIFEST} (of a bundle); give one of the three"
    )


def _tokens(targets: list[_Target], content: str) -> list[int]:
    """The text's tokens, which must be the same for all targets."""
    first, ids = targets[0], targets[0].encode(content)
    for other in targets[1:]:
        if other.vocab_size != first.vocab_size:
            raise ConfigError(
                f"{first.path} has a vocabulary of {first.vocab_size}, {other.path} of "
                f"{other.vocab_size}; only targets of one vocabulary can be compared"
            )
        if other.encode(content) != ids:
            raise ConfigError(
                f"the tokenizers of {first.path} and {other.path} cut the text into different "
                f"tokens; only targets with one tokenizer.json can be compared"
            )
    return ids


def _context(targets: list[_Target], wanted: int | None) -> int:
    """Tokens of a window: by default all that every target can take."""
    least = min(targets, key=lambda target: target.max_context)
    if wanted is not None and wanted > least.max_context:
        what = "max_context" if least.kind == "bundle" else "n_positions"
        raise ConfigError(
            f"--context {wanted}: {least.path} has {what} {least.max_context}; give at most that"
        )
    return wanted or least.max_context


def _score(target: _Target, windows: npt.NDArray[np.int64], device: Device) -> _Scored:
    from tqdm import tqdm

    from edge_rt.bench.perplexity import score_bundle, score_model
    from edge_rt.bundle import Bundle

    started = time.monotonic()
    with tqdm(
        total=1.0,
        desc=str(target.path),
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
        leave=False,
        disable=None,
    ) as bar:

        def progress(share: float) -> None:
            bar.update(min(share, 1.0 - bar.n))  # shares add up to 1 only up to rounding

        if isinstance(target.source, Bundle):
            score = score_bundle(target.source, windows, progress)
        else:
            score = score_model(target.source, windows, device, progress)
    seconds = time.monotonic() - started
    interval = score.interval()
    if not all(map(math.isfinite, (score.perplexity, *(interval or ())))):
        raise CheckpointError(
            f"the perplexity of {target.path} is beyond what a float64 can hold; "
            f"its weights are damaged, or the text is none for this model"
        )
    return _Scored(
        score,
        {
            "target": str(target.path),
            "kind": target.kind,
            "perplexity": score.perplexity,
            "perplexity_ci95": interval,
            "predicted_tokens": score.predicted_tokens,
            "windows": len(windows),
            "context_tokens": windows.shape[1],
            "top1_accuracy": score.top1_accuracy,
            "duration_s": seconds,
            "tokens_per_s": score.predicted_tokens / seconds,
        },
    )


def lines(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    text = [
        _line(result),
        (
            f"  {result['predicted_tokens']:,} tokens predicted in {result['windows']} windows of "
            f"{result['context_tokens']}"
        ),
    ]
    if "against" in result:
        interval = _interval(result["perplexity_difference_ci95"], "+.4f")
        text.insert(1, _line(result["against"]))
        text.append(
            f"  difference {result['perplexity_difference']:+.4f} ({interval}); "
            f"greedy agreement {100 * result['greedy_agreement']:.2f} %"
        )
    return text


def _line(result: dict[str, Any]) -> str:
    return (
        f"{result['target']} ({result['kind']}): perplexity {result['perplexity']:.4f} "
        f"({_interval(result['perplexity_ci95'], '.4f')}), "
        f"next token right {100 * result['top1_accuracy']:.2f} %, "
        f"{result['tokens_per_s']:.0f} tokens/s"
    )


def _interval(interval: tuple[float, float] | None, form: str) -> str:
    if interval is None:
        return "no interval: it takes 2 windows or more"
    low, high = interval
    return f"95 % interval {low:{form}} to {high:{form}}"
