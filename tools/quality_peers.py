"""Compare edge_rt's INT4 quantizer with other libraries': same weights, same activations.

The float model reads the calibration text; every quantizer gets the same linears with the
activations X that they read there, and makes 4-bit weights in groups of 128 along the input,
asymmetric. The error is that of the outputs, ||X (W - Wq)||^2 / ||X W||^2, in float64, on the
calibration activations and on those of the held-out text. `centred` is the same with the mean of
the calibration activations taken off X: what is left when a bias makes up for the mean error.
Weights only, by one formula for all; biases are not compared.

    pip install edge-rt[ort] onnx-ir llmcompressor gptqmodel  # what is missing is left out
    python tools/quality_peers.py --json quality-peers.json

Time is that of quantizing, with the activations' second moment known.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

import edge_rt
from edge_rt import recipes
from edge_rt.model import gptj
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.device import Device
from edge_rt.model.gptj import F32, LINEARS, Layer, Linear, LinearSpec, ModelConfig
from edge_rt.quant.calibration import Moments, sample_sequences
from edge_rt.quant.curvature import Curvature
from edge_rt.quant.gptq import ROUNDS, gptq
from edge_rt.quant.grid import fit
from edge_rt.quant.group import GroupQuantizer
from edge_rt.quant.pipeline import text_tokens
from edge_rt.quant.salient import salient_channels
from edge_rt.recipes import QuantRecipe

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

GROUP = 128
BITS = 4
QMAX = 2**BITS - 1
SALIENT = 0.01
BATCH = 4  # windows at a time
METRICS = ("calibration", "heldout", "calibration_centred", "heldout_centred")
OURS = "edge_rt GPTQ"  # what peers are compared with: the same storage, no channels in FP16


@dataclass(frozen=True, slots=True)
class Reading:
    """What some linears read: calibration activations [tokens, channels] and their moments.

    `measures`: the second moments [channels, channels] that errors are measured by, by METRICS.
    """

    x: F32
    second: F64
    moments: Moments
    measures: Mapping[str, F64]


Results = dict[str, dict[str, dict[str, float]]]  # by way, linear and metric
Weights = dict[str, F32]  # by linear, [inputs, outputs]
# Prepares (imports, copies, second moments) and returns what quantizes, which is timed.
Way = Callable[[Weights, Reading], Callable[[], Weights]]


def each(one: Callable[..., Callable[[], Any]], **settings: Any) -> Way:
    """A way that takes the linears one by one."""

    def prepare(weights: Weights, reading: Reading) -> Callable[[], Weights]:
        ready = {name: one(weight, reading, **settings) for name, weight in weights.items()}
        return lambda: {name: quantize() for name, quantize in ready.items()}

    return prepare


def ours() -> dict[str, Way]:
    """edge_rt's own: FP16 scales, whole zero points."""

    def rtn(weight: F32, _reading: Reading) -> Callable[[], F32]:
        return lambda: fit(weight, [], GROUP, QMAX).rounded(weight, [])

    def alone(weight: F32, reading: Reading, rounds: int, kept: float) -> Callable[[], F32]:
        salient = salient_channels(reading.moments.mean_magnitude, kept).tolist()
        hessian = reading.moments.about_zero()

        def quantize() -> F32:
            made: F32
            made, _ = gptq(weight, Curvature.of(hessian, salient, GROUP), qmax=QMAX, rounds=rounds)
            return made

        return quantize

    def group(weights: Weights, reading: Reading, fraction: float) -> Callable[[], Weights]:
        recipe = QuantRecipe(outlier_fraction=fraction)  # groups of 128
        quantizer = GroupQuantizer(recipe, Device.open(), np.random.default_rng(0), QMAX)
        specs = [spec for spec in LINEARS if spec.name in weights]
        linears = {name: Linear(weight.T) for name, weight in weights.items()}

        def quantize() -> Weights:
            made = quantizer.quantize(specs, linears, reading.moments).serving()
            return {name: linear.weight.T for name, linear in made.items()}

        return quantize

    return {
        "edge_rt RTN": each(rtn),
        "edge_rt GPTQ, one sweep": each(alone, rounds=0, kept=0.0),
        OURS: each(alone, rounds=ROUNDS, kept=0.0),
        "edge_rt AWQ + GPTQ": functools.partial(group, fraction=0.0),
        "edge_rt GPTQ, 1 % FP16": each(alone, rounds=ROUNDS, kept=SALIENT),
        "edge_rt AWQ + GPTQ, 1 % FP16": functools.partial(group, fraction=SALIENT),
    }


def onnxruntime_ways() -> dict[str, Way]:
    """onnxruntime's copy of Intel Neural Compressor: float64 scales here, FP32 when stored."""
    library = import_module("onnxruntime.quantization.neural_compressor.weight_only")

    plain = functools.partial(library.quant_tensor, scheme="asym", dtype="uint")

    def dequantized(weight: F32, quant: Callable[..., Any]) -> F32:
        levels, scale, zero = quant(np.ascontiguousarray(weight.T), BITS, GROUP)
        return cast("F32", (scale * (levels - zero.astype(np.float64))).reshape(weight.T.shape).T)

    def rounded(weight: F32, _reading: Reading, quant: Callable[..., Any]) -> Callable[[], F32]:
        return lambda: dequantized(weight, quant)

    def gptq_of(
        weight: F32, reading: Reading, *, stored: bool = False, **settings: bool
    ) -> Callable[[], F32]:
        w, hessian = weight.copy(), 2.0 * reading.second  # both are overwritten

        def quantize() -> F32:
            q = library.gptq(w, hessian, BITS, GROUP, "asym", 128, 0.01, **settings)
            return dequantized(q, plain) if stored else cast("F32", q)

        return quantize

    best = {"actorder": True, "mse": True}
    return {
        "onnxruntime RTN": each(rounded, quant=plain),
        "onnxruntime k-quant": each(rounded, quant=library.quant_tensor_k_quant_cpu),
        "onnxruntime GPTQ": each(gptq_of),
        "onnxruntime GPTQ mse": each(gptq_of, mse=True),
        "onnxruntime GPTQ actorder mse": each(gptq_of, **best),
        "onnxruntime GPTQ mse, as stored": each(gptq_of, mse=True, stored=True),
        "onnxruntime GPTQ actorder mse, as stored": each(gptq_of, **best, stored=True),
    }


def llmcompressor_ways() -> dict[str, Way]:
    """The GPTQModifier's parts: actorder static and damping 0.01, its defaults; FP32 scales."""
    torch = import_module("torch")
    quantization = import_module("compressed_tensors.quantization")
    observers = import_module("llmcompressor.observers").Observer
    library = import_module("llmcompressor.modifiers.gptq.gptq_quantize")
    settings = {"num_bits": BITS, "symmetric": False, "actorder": "static"}
    settings |= {"strategy": "group", "group_size": GROUP}

    def one(weight: F32, reading: Reading, observer: str) -> Callable[[], F32]:
        args = quantization.QuantizationArgs(**settings, observer=observer)
        module = _module(torch, weight)
        watching = observers.load_from_registry(observer, base_name="weight", args=args)
        watching.attach(module)
        # All it takes from activations is each channel's mean square: one row tells it.
        module(torch.from_numpy(np.sqrt(np.diagonal(reading.second))[None].astype(np.float32)))
        watching.detach(module)
        hessian = torch.from_numpy((2.0 * reading.second).astype(np.float32))[None]

        def quantize() -> F32:
            with torch.no_grad():
                watching(module.weight)
                found = watching.get_qparams()
                scale, zero = found["scale"][None], found["zero_point"][None]
                wide = module.weight.data[None].clone()
                made, *_ = library.quantize_weight(wide, hessian, scale, zero, None, args)
            return cast("F32", made[0].numpy().T)

        return quantize

    return {
        "llmcompressor GPTQ minmax": each(one, observer="memoryless_minmax"),
        "llmcompressor GPTQ mse": each(one, observer="memoryless_mse"),
        "llmcompressor GPTQ imatrix": each(one, observer="imatrix_mse"),
    }


def gptqmodel_ways() -> dict[str, Way]:
    """GPTQModel, AutoGPTQ's successor: damping 0.05, its default; FP32 scales."""
    torch = import_module("torch")
    library = import_module("gptqmodel.quantization.gptq")
    config_of = import_module("gptqmodel").QuantizeConfig

    def one(weight: F32, reading: Reading, **settings: Any) -> Callable[[], F32]:
        config = config_of(bits=BITS, group_size=GROUP, sym=False, **settings)
        task = library.GPTQ(_module(torch, weight), config)
        task.quantizer.configure(perchannel=True)
        task.add_batch(torch.from_numpy(reading.x)[None], None)
        task.finalize_hessian()

        def quantize() -> F32:
            with torch.no_grad():
                return cast("F32", task.quantize()[0].numpy().T)

        return quantize

    best: dict[str, Any] = {"mse": 2.4, "desc_act": True, "act_group_aware": False}
    return {
        "gptqmodel": each(one),  # act_group_aware
        "gptqmodel mse": each(one, mse=2.4),
        "gptqmodel desc_act mse": each(one, **best),
        "gptqmodel desc_act static_groups mse": each(one, **best, static_groups=True),
    }


def _module(torch: Any, weight: F32) -> Any:
    module = torch.nn.Linear(*weight.shape, bias=False)
    module.weight.data = torch.from_numpy(np.ascontiguousarray(weight.T))
    return module


def activations(
    hidden: list[F32], layer: Layer, config: ModelConfig
) -> Iterator[tuple[str, list[F32]]]:
    """What each group of the layer's linears reads, batch by batch; `hidden` moves behind it."""
    passes = [gptj.layer_steps(x, layer, config) for x in hidden]
    for reads in dict.fromkeys(spec.reads for spec in LINEARS):
        found = [next(one).activations() for one in passes]
        yield reads, [x.reshape(-1, x.shape[-1]) for x in found]
    for place, one in enumerate(passes):
        try:
            next(one)
        except StopIteration as done:
            hidden[place] = done.value


def reading(
    shown: Sequence[F32], heldout: Sequence[F32], specs: Sequence[LinearSpec], n_embd: int
) -> Reading:
    """The moments of both texts; held-out ones are centred at the calibration text's mean."""
    # The linear is the first to be quantized: the residual stream before it lacks nothing.
    outputs = n_embd if any(spec.residual for spec in specs) else 0
    moments = Moments.total((x, x, np.zeros((len(x), outputs), np.float32)) for x in shown)
    (mean, second), (fresh_mean, fresh) = _moment(shown), _moment(heldout)
    cross, square = np.outer(fresh_mean, mean), np.outer(mean, mean)
    measures = (second, fresh, second - square, fresh - cross - cross.T + square)
    named = dict(zip(METRICS, measures, strict=True))
    return Reading(np.concatenate(shown), second, moments, named)


def _moment(batches: Sequence[F32]) -> tuple[F64, F64]:
    """Mean and second moment."""
    mean, second = np.zeros(batches[0].shape[1]), np.zeros((batches[0].shape[1],) * 2)
    for x in batches:
        wide = x.astype(np.float64)
        mean += wide.sum(0)
        second += wide.T @ wide
    tokens = sum(len(x) for x in batches)
    return mean / tokens, second / tokens


def error(weight: F32, made: F32, second: F64) -> float:
    """||X (W - Wq)||^2 / ||X W||^2, from the second moment of X."""
    wide = weight.astype(np.float64)
    off = wide - made
    return float(np.sum((second @ off) * off) / np.sum((second @ wide) * wide))


def study(
    checkpoint: Checkpoint, ways: Mapping[str, Way], texts: Sequence[I64], layers: int
) -> Results:
    """Way -> linear -> errors; `texts`: windows [windows, tokens] to calibrate on, and held out."""
    embedding, config = checkpoint.tensor("transformer.wte.weight"), checkpoint.config
    streams = [
        [embedding[text[i : i + BATCH]] for i in range(0, len(text), BATCH)] for text in texts
    ]
    results: Results = {way: {} for way in ways}
    for index in range(layers):
        layer = gptj.layer_from_tensors(checkpoint.layer(index))
        both = (activations(stream, layer, config) for stream in streams)
        for (reads, shown), (_, heldout) in zip(*both, strict=True):
            specs = [spec for spec in LINEARS if spec.reads == reads]
            found = reading(shown, heldout, specs, config.n_embd)
            weights = {s.name: np.ascontiguousarray(layer.linears[s.name].weight.T) for s in specs}
            for way, prepare in ways.items():
                with contextlib.redirect_stdout(sys.stderr):  # some libraries talk
                    quantize = prepare(weights, found)
                    started = time.perf_counter()
                    made = quantize()
                seconds = (time.perf_counter() - started) / len(weights)
                for name, weight in weights.items():
                    one = {key: error(weight, made[name], found.measures[key]) for key in METRICS}
                    results[way][f"{index}.{name}"] = one | {"seconds": seconds}
            sys.stderr.write(f"layer {index}: {reads}\n")
    return results


def summary(results: Results) -> dict[str, dict[str, float]]:
    """Way -> geometric means over linears, seconds in all, and how OURS compares by linear.

    `ours_better`: on how many its held-out error is less; `ratio_*`: the way's over OURS.
    """
    table: dict[str, dict[str, float]] = {}
    for way, linears in results.items():
        every = list(linears.values())
        means = {key: math.exp(np.mean([math.log(one[key]) for one in every])) for key in METRICS}
        ratios = [one["heldout"] / results[OURS][name]["heldout"] for name, one in linears.items()]
        table[way] = means | {
            "seconds": sum(one["seconds"] for one in every),
            "ours_better": sum(ratio > 1.0 for ratio in ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
    return table


def lines(table: Mapping[str, Mapping[str, float]], linears: int) -> Iterator[str]:
    """The summary for people, errors in thousandths."""
    head = ("calib.", "held-out", "calib. c.", "held-out c.", "seconds", "ratios")
    yield f"{'errors in 1/1000 (c.: centred)':42}" + "".join(f"{name:>12}" for name in head)
    for way, one in table.items():
        errors = "".join(f"{1000 * one[key]:12.3f}" for key in METRICS)
        ratios = f"{one['ratio_min']:.2f}-{one['ratio_max']:.2f}{one['ours_better']:6} of {linears}"
        yield f"{way:42}{errors}{one['seconds']:12.1f}   {ratios}"
    yield f"ratios: of the held-out error to that of '{OURS}', which is better on so many linears"


def available() -> tuple[dict[str, Way], dict[str, str | None]]:
    """The ways that this machine has, and each library's version, None where it is missing."""
    ways, found = ours(), cast("dict[str, str | None]", {"edge-rt": edge_rt.__version__})
    peers = (onnxruntime_ways, llmcompressor_ways, gptqmodel_ways)
    for name, make in zip(("onnxruntime", "llmcompressor", "gptqmodel"), peers, strict=True):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                ways |= make()
            found[name] = metadata.version(name)
        except ImportError as problem:
            found[name] = None
            sys.stderr.write(f"{name} is left out: {problem}\n")
    found |= {"numpy": np.__version__, "python": platform.python_version()}
    return ways, found


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    root = Path(__file__).parent.parent
    parser.add_argument("--checkpoint", type=Path, default=root / "engines/demo")
    parser.add_argument("--windows", type=int, default=64, help="of each text")
    parser.add_argument("--tokens", type=int, default=512, help="of each window")
    parser.add_argument("--layers", type=int, help="only so many, from the first (default: all)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args()
    checkpoint = Checkpoint.open(options.checkpoint)
    config, texts = checkpoint.config, []
    for name in ("calibration.txt", "heldout.txt"):
        tokens = text_tokens(recipes.data_dir("calib") / name, options.checkpoint, config)
        texts.append(sample_sequences(tokens, options.windows, options.tokens))
    ways, versions = available()
    results = study(checkpoint, ways, texts, options.layers or config.n_layer)
    table = summary(results)
    for line in lines(table, len(results[OURS])):
        sys.stdout.write(line + "\n")
    if options.json:
        describe = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(describe, cwd=root, capture_output=True, text=True, check=False)
        record: dict[str, Any] = {"date": datetime.now(timezone.utc).date().isoformat()}
        record |= {"commit": commit.stdout.strip(), "machine": _machine(), "versions": versions}
        record |= {"windows": options.windows, "tokens": options.tokens}
        record |= {"summary": table, "linears": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _machine() -> str:
    facts = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", facts.read_text("ascii") if facts.is_file() else "")
    name = found[1] if found else platform.processor()
    return f"{name}, {platform.machine()}, {platform.system()}"


if __name__ == "__main__":
    main()
