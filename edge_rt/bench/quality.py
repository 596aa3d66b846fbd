"""What each part of the quantizer buys: perplexity on held-out text, part by part.

Each variant is quantized with several seeds (which draw the calibration text, and random channels)
and scored on the same windows of the held-out text. Perplexities are means over the seeds;
intervals are 95 % percentile bootstraps over windows and seeds, in pairs: every variant on the
same windows.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_rt import recipes
from edge_rt.bench.perplexity import (
    RESAMPLES,
    FloatModel,
    of_checkpoint,
    percentiles,
    score_model,
    windows,
)
from edge_rt.errors import ConfigError, EdgeRTError
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.device import Device, DeviceName
from edge_rt.model.gptj import LINEARS, ModelConfig, in_features, layer_tensors
from edge_rt.quant.pack import to_half
from edge_rt.quant.pipeline import text_tokens
from edge_rt.quant.salient import salient_count
from edge_rt.quant.source import QuantizedLayers
from edge_rt.recipes import CalibrationText, QuantRecipe

F64 = npt.NDArray[np.float64]

WINDOW = 512  # tokens of one calibration sequence

VARIANTS: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn", "awq": False, "outlier_fraction": 0.0},
    "rtn_gptq": {"method": "gptq", "awq": False, "outlier_fraction": 0.0},
    "rtn_salient": {"method": "rtn", "awq": False},
    "rtn_salient_by_weight": {"method": "rtn", "awq": False, "salient": "weight"},
    "rtn_salient_random": {"method": "rtn", "awq": False, "salient": "random"},
    "awq": {"method": "rtn", "outlier_fraction": 0.0},
    "awq_salient": {"method": "rtn"},
    "awq_salient_gptq": {},
}
# What the seed does not change is made once.
_SEEDLESS = ("rtn", "rtn_salient_by_weight")


@dataclass(frozen=True, slots=True)
class Study:
    """What is measured on what: the model's directory, the two texts, and how much of them.

    `sequences` of WINDOW calibration tokens are drawn; at most `tokens` held-out tokens are scored
    (None: all).
    """

    checkpoint: Path
    calibration: Path
    heldout: Path
    device: DeviceName = "cpu"
    seeds: int = 5
    sequences: int = 384
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"a study needs 1 seed or more, found {self.seeds}")


@dataclass(frozen=True, slots=True)
class Task:
    """One model to make and score; `name` None is the float model."""

    name: str | None
    bits: int
    seed: int


def tasks(study: Study, bits: int) -> list[Task]:
    """Everything that one table needs but the float model, the slowest first."""
    return [
        Task(name, bits, seed)
        for name in reversed(VARIANTS)
        for seed in range(1 if name in _SEEDLESS else study.seeds)
    ]


def run(study: Study, todo: Sequence[Task], workers: int) -> Iterator[tuple[Task, F64]]:
    """Score the tasks, as they are done: negative log-likelihood of each window, in nats a token.

    With more than one worker, processes of one thread each: small products gain nothing from more.
    """
    if workers == 1:
        for task in todo:
            yield task, score(study, task)
        return
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(score, study, task): task for task in todo}
        for future in as_completed(futures):
            yield futures[future], future.result()


def score(study: Study, task: Task) -> F64:
    """Make one model and score it: nats a predicted token, [windows]."""
    checkpoint = Checkpoint.open(study.checkpoint)
    heldout = _tokens(study.heldout, study.checkpoint, checkpoint.config, "held-out text")
    heldout = heldout[: study.tokens]
    if task.name is None:
        model = of_checkpoint(checkpoint)
    else:
        shown = CalibrationText(sequences=study.sequences, tokens=WINDOW, seed=task.seed)
        recipe = QuantRecipe(**VARIANTS[task.name], calibration=shown)
        model = _quantized(checkpoint, recipe, study, 2**task.bits - 1)
    cut = windows(heldout, checkpoint.config.n_positions)
    found = score_model(model, cut, Device.open(study.device))
    return found.nll / found.greedy.shape[1]


def _quantized(checkpoint: Checkpoint, recipe: QuantRecipe, study: Study, qmax: int) -> FloatModel:
    """The model with every layer quantized and the rest in FP16, in memory."""
    original = of_checkpoint(checkpoint)
    tokens = _tokens(study.calibration, study.checkpoint, checkpoint.config)
    source = QuantizedLayers(checkpoint, recipe, Device.open(study.device), tokens, qmax)
    layers = [source.make(index).layer for index in range(checkpoint.config.n_layer)]
    head = source.head(original.head())
    head = replace(head, weight=_half(head.weight, "lm_head.weight"))
    embedding = _half(original.embedding(), "the embedding")
    return FloatModel(checkpoint.config, lambda: embedding, layers.__getitem__, lambda: head)


# Hundreds of tasks read the same two texts.
_tokens = functools.lru_cache(maxsize=4)(text_tokens)


def _half(x: npt.NDArray[np.float32], what: str) -> npt.NDArray[np.float32]:
    return to_half(x, what).astype(np.float32)


def measure(
    study: Study, bits: Sequence[int], workers: int, say: Callable[[str], object]
) -> dict[str, Any]:
    """The tables for `bits`, the first of them at the top: the keys of `tools/quality --json`."""
    started = time.monotonic()
    fp16 = score(study, Task(None, 16, 0))
    say(f"fp16: perplexity {np.exp(fp16.mean()):.4f} ({time.monotonic() - started:.0f} s)")
    scores: dict[int, dict[str, dict[int, F64]]] = {b: {n: {} for n in VARIANTS} for b in bits}
    todo = [task for b in bits for task in tasks(study, b)]
    for done, (task, nll) in enumerate(run(study, todo, workers), 1):
        assert task.name is not None
        scores[task.bits][task.name][task.seed] = nll
        elapsed = time.monotonic() - started
        say(
            f"{done}/{len(todo)} {task.name}, {task.bits} bits, seed {task.seed}: "
            f"{np.exp(nll.mean()):.4f} ({elapsed:.0f} s, about "
            f"{elapsed / done * (len(todo) - done):.0f} s to go)"
        )
    # By seed, not as they came in: the intervals draw seeds by their place.
    tables = {
        b: {
            "bits": b,
            **table(
                fp16, {name: [of[seed] for seed in sorted(of)] for name, of in scores[b].items()}
            ),
        }
        for b in bits
    }
    checkpoint = Checkpoint.open(study.checkpoint)
    count = len(fp16) * (checkpoint.config.n_positions - 1)
    return {
        **tables[bits[0]],
        "fp16_fraction": _fp16_fraction(checkpoint.config),
        "predicted_tokens": count,
        "windows": len(fp16),
        "context_tokens": checkpoint.config.n_positions,
        "calibration_tokens": study.sequences * WINDOW,
        "seeds": study.seeds,
        "device": study.device,
        "duration_s": time.monotonic() - started,
        "others": [tables[b] for b in bits[1:]],
    }


def _fp16_fraction(config: ModelConfig) -> float:
    """Share of the linears' weights that 1 % of salient channels keep in FP16."""
    kept = every = 0
    for spec in LINEARS:
        inputs = in_features(spec, config)
        outputs = sum(layer_tensors(config)[name][0] for name in spec.tensors)
        kept += outputs * salient_count(inputs, QuantRecipe().outlier_fraction)
        every += outputs * inputs
    return kept / every


def table(fp16: F64, scores: Mapping[str, Sequence[F64]]) -> dict[str, Any]:
    """Perplexity, loss against `fp16` and share of rtn's loss recovered, each with its interval.

    `fp16` nats a token [windows]; `scores` the same for each variant, one array a seed.
    """
    rng = np.random.default_rng(0)
    count, names = len(fp16), list(scores)
    everything = slice(None)
    point = {
        name: _perplexity(scores[name], everything, range(len(scores[name]))) for name in names
    }
    base = _perplexity([fp16], everything, [0])
    resampled: dict[str, list[float]] = {name: [] for name in ("fp16", *names)}
    for _ in range(RESAMPLES):
        chosen = rng.integers(count, size=count)
        resampled["fp16"].append(_perplexity([fp16], chosen, [0]))
        for name in names:
            seeds = len(scores[name])
            drawn = rng.integers(seeds, size=seeds)
            resampled[name].append(_perplexity(scores[name], chosen, drawn.tolist()))
    drawn_of = {name: np.array(values) for name, values in resampled.items()}
    perplexity: dict[str, Any] = {"fp16": base, "fp16_ci95": list(percentiles(drawn_of["fp16"]))}
    loss: dict[str, Any] = {}
    recovered: dict[str, Any] = {}
    for name in names:
        lost = drawn_of[name] - drawn_of["fp16"]
        perplexity |= {name: point[name], f"{name}_ci95": list(percentiles(drawn_of[name]))}
        loss |= {name: point[name] - base, f"{name}_ci95": list(percentiles(lost))}
        if "rtn" in names:
            share = 1.0 - lost / (drawn_of["rtn"] - drawn_of["fp16"])
            recovered[name] = 1.0 - (point[name] - base) / (point["rtn"] - base)
            recovered[f"{name}_ci95"] = list(percentiles(share))
    return {"perplexity": perplexity, "loss": loss, "recovered": recovered}


def _perplexity(seeds: Sequence[F64], chosen: Any, drawn: Sequence[int]) -> float:
    return float(np.mean([np.exp(seeds[seed][chosen].mean()) for seed in drawn]))


def text(found: Mapping[str, Any]) -> str:
    """The tables for a person."""
    scope = f"{found['predicted_tokens']} tokens predicted in {found['windows']} windows of "
    lines = [f"{scope}{found['context_tokens']}; {found['seeds']} seeds; 95 % intervals"]
    for one in (found, *found["others"]):
        perplexity, loss, recovered = one["perplexity"], one["loss"], one["recovered"]
        low, high = perplexity["fp16_ci95"]
        lines += [
            "",
            f"{one['bits']} bits; fp16: {perplexity['fp16']:.4f} ({low:.3f} to {high:.3f})",
            f"{'':24}{'perplexity':>10}{'lost':>9}{'':19}{'recovered':>10}",
        ]
        for name in VARIANTS:
            low, high = loss[f"{name}_ci95"]
            from_, to = recovered[f"{name}_ci95"]
            lines.append(
                f"{name:24}{perplexity[name]:10.4f}{loss[name]:9.4f} ({low:.4f} to {high:.4f})"
                f"{100 * recovered[name]:8.1f} % ({100 * from_:.0f} to {100 * to:.0f})"
            )
    return "\n".join(lines)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """`tools/quality`: progress on stderr, the tables or one JSON object on stdout."""
    parser = argparse.ArgumentParser(prog="tools/quality", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=recipes.data_dir("engines") / "demo")
    for name in ("calibration", "heldout"):
        parser.add_argument(
            f"--{name}", type=Path, default=recipes.data_dir("calib") / f"{name}.txt"
        )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--bits", type=int, nargs="+", choices=(3, 4), default=[4, 3])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=384, help=f"of {WINDOW} tokens each")
    parser.add_argument("--tokens", type=int, help="of the held-out text (default: all)")
    parser.add_argument("--workers", type=int, help="processes (default: one a core; CUDA: 1)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    options = parser.parse_args(arguments)
    workers = options.workers or (1 if options.device == "cuda" else os.cpu_count() or 1)
    try:
        study = Study(
            checkpoint=options.checkpoint,
            calibration=options.calibration,
            heldout=options.heldout,
            device=options.device,
            seeds=options.seeds,
            sequences=options.sequences,
            tokens=options.tokens,
        )
        found = measure(study, options.bits, workers, _say)
    except EdgeRTError as error:
        sys.stderr.write(f"tools/quality: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    rendered = json.dumps(found, indent=2) + "\n"
    if options.json not in {None, "-"}:
        Path(options.json).write_text(rendered, encoding="utf-8")
    sys.stdout.write(rendered if options.json == "-" else text(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
