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
import json
import math
import platform
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
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.device import Device
from edge_rt.model.gptj import (
    LINEARS,
    Layer,
    Linear,
    LinearSpec,
    ModelConfig,
    layer_from_tensors,
    layer_steps,
)
from edge_rt.quant.calibration import Moments, sample_sequences
from edge_rt.quant.gptq import gptq
from edge_rt.quant.grid import fit
from edge_rt.quant.group import GroupQuantizer
from edge_rt.quant.pipeline import calibration_tokens
from edge_rt.quant.salient import salient_channels
from edge_rt.recipes import QuantRecipe

F32 = npt.NDArray[np.float32]
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

    @property
    def salient(self) -> list[int]:
        """The channels that edge_rt keeps in FP16."""
        return [int(c) for c in salient_channels(self.moments.mean_magnitude, SALIENT)]


Results = dict[str, dict[str, dict[str, float]]]  # by way, linear and metric
Weights = dict[str, F32]  # by linear, [inputs, outputs]
# Prepares (imports, copies, second moments) and returns what quantizes, which is timed.
Way = Callable[[Weights, Reading], Callable[[], Weights]]
One = Callable[[F32, Reading], Callable[[], F32]]


def say(message: str) -> None:
    """Write one line of progress to stderr."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def each(one: One) -> Way:
    """A way that takes the linears one by one."""

    def prepare(weights: Weights, reading: Reading) -> Callable[[], Weights]:
        ready = {name: one(weight, reading) for name, weight in weights.items()}
        return lambda: {name: quantize() for name, quantize in ready.items()}

    return prepare


def ours() -> dict[str, Way]:
    """edge_rt's own: FP16 scales, whole zero points."""

    def rtn(weight: F32, _reading: Reading) -> Callable[[], F32]:
        return lambda: fit(weight, [], GROUP, QMAX).rounded(weight, [])

    def with_gptq(rounds: int, keep: bool) -> One:
        def prepare(weight: F32, reading: Reading) -> Callable[[], F32]:
            hessian, salient = reading.moments.mean_square, reading.salient if keep else []
            return lambda: gptq(
                weight, hessian, salient, group_size=GROUP, qmax=QMAX, rounds=rounds
            )[0]

        return prepare

    def group(fraction: float) -> Way:
        recipe = QuantRecipe(outlier_fraction=fraction)  # groups of 128
        quantizer = GroupQuantizer(recipe, Device.open(), np.random.default_rng(0), QMAX)

        def prepare(weights: Weights, reading: Reading) -> Callable[[], Weights]:
            specs = [spec for spec in LINEARS if spec.name in weights]
            linears = {name: Linear(weight.T) for name, weight in weights.items()}

            def quantize() -> Weights:
                made = quantizer.quantize(specs, linears, reading.moments)
                return {
                    name: cast("F32", one.weight / made.scales[:, None])
                    for name, one in made.weights.items()
                }

            return quantize

        return prepare

    return {
        "edge_rt RTN": each(rtn),
        "edge_rt GPTQ, one sweep": each(with_gptq(0, keep=False)),
        OURS: each(with_gptq(2, keep=False)),
        "edge_rt AWQ + GPTQ": group(0.0),
        "edge_rt GPTQ, 1 % FP16": each(with_gptq(2, keep=True)),
        "edge_rt AWQ + GPTQ, 1 % FP16": group(SALIENT),
    }


def onnxruntime_ways() -> dict[str, Way]:
    """onnxruntime's copy of Intel Neural Compressor: float64 scales here, FP32 when stored."""
    library = import_module("onnxruntime.quantization.neural_compressor.weight_only")

    def dequantized(weight: npt.NDArray[Any], quant: Callable[..., Any], *args: str) -> F32:
        levels, scale, zero = quant(np.ascontiguousarray(weight.T), BITS, GROUP, *args)
        return cast("F32", (scale * (levels - zero.astype(np.float64))).reshape(weight.T.shape).T)

    def rtn(weight: F32, _reading: Reading) -> Callable[[], F32]:
        return lambda: dequantized(weight, library.quant_tensor, "asym", "uint")

    def k_quant(weight: F32, _reading: Reading) -> Callable[[], F32]:
        return lambda: dequantized(weight, library.quant_tensor_k_quant_cpu)

    def with_gptq(actorder: bool, mse: bool, stored: bool = False) -> One:
        def prepare(weight: F32, reading: Reading) -> Callable[[], F32]:
            w, hessian = weight.copy(), 2.0 * reading.second  # both are overwritten

            def quantize() -> F32:
                q = library.gptq(
                    w, hessian, BITS, GROUP, "asym", 128, 0.01, actorder=actorder, mse=mse
                )
                return dequantized(q, library.quant_tensor, "asym", "uint") if stored else q

            return quantize

        return prepare

    return {
        "onnxruntime RTN": each(rtn),
        "onnxruntime k-quant": each(k_quant),
        "onnxruntime GPTQ": each(with_gptq(actorder=False, mse=False)),
        "onnxruntime GPTQ mse": each(with_gptq(actorder=False, mse=True)),
        "onnxruntime GPTQ actorder mse": each(with_gptq(actorder=True, mse=True)),
        "onnxruntime GPTQ mse, as stored": each(with_gptq(actorder=False, mse=True, stored=True)),
        "onnxruntime GPTQ actorder mse, as stored": each(
            with_gptq(actorder=True, mse=True, stored=True)
        ),
    }


def llmcompressor_ways() -> dict[str, Way]:
    """The GPTQModifier's parts: actorder static and damping 0.01, its defaults; FP32 scales."""
    torch = import_module("torch")
    quantization = import_module("compressed_tensors.quantization")
    observers = import_module("llmcompressor.observers")
    library = import_module("llmcompressor.modifiers.gptq.gptq_quantize")

    def way(observer_name: str) -> One:
        def prepare(weight: F32, reading: Reading) -> Callable[[], F32]:
            args = quantization.QuantizationArgs(
                num_bits=BITS,
                symmetric=False,
                strategy="group",
                group_size=GROUP,
                actorder="static",
                observer=observer_name,
            )
            module = _module(torch, weight)
            observer = observers.Observer.load_from_registry(
                observer_name, base_name="weight", args=args
            )
            observer.attach(module)
            # All it takes from activations is each channel's mean square: one row tells it.
            row = np.sqrt(np.diagonal(reading.second)).astype(np.float32)
            module(torch.from_numpy(row[None]))
            observer.detach(module)
            hessian = torch.from_numpy((2.0 * reading.second).astype(np.float32))

            def quantize() -> F32:
                with torch.no_grad():
                    observer(module.weight)
                    found = observer.get_qparams()
                    made = library.quantize_weight(
                        module.weight.data[None].clone(),
                        hessian[None],
                        found["scale"][None],
                        found["zero_point"][None],
                        None,
                        args,
                        percdamp=0.01,
                    )[0][0]
                return cast("F32", made.numpy().T)

            return quantize

        return prepare

    return {
        f"llmcompressor GPTQ {name}": each(way(observer))
        for name, observer in (
            ("minmax", "memoryless_minmax"),
            ("mse", "memoryless_mse"),
            ("imatrix", "imatrix_mse"),
        )
    }


def gptqmodel_ways() -> dict[str, Way]:
    """GPTQModel, AutoGPTQ's successor: damping 0.05, its default; FP32 scales."""
    torch = import_module("torch")
    library = import_module("gptqmodel.quantization.gptq")
    config_of = import_module("gptqmodel").QuantizeConfig

    def way(**settings: Any) -> One:
        def prepare(weight: F32, reading: Reading) -> Callable[[], F32]:
            config = config_of(bits=BITS, group_size=GROUP, sym=False, **settings)
            task = library.GPTQ(_module(torch, weight), config)
            task.quantizer.configure(perchannel=True)
            task.add_batch(torch.from_numpy(reading.x)[None], None)
            task.finalize_hessian()

            def quantize() -> F32:
                with torch.no_grad():
                    return cast("F32", task.quantize()[0].numpy().T)

            return quantize

        return prepare

    by_activation = {"desc_act": True, "act_group_aware": False}
    return {
        "gptqmodel": each(way()),  # act_group_aware
        "gptqmodel mse": each(way(mse=2.4)),
        "gptqmodel desc_act mse": each(way(mse=2.4, **by_activation)),
        "gptqmodel desc_act static_groups mse": each(
            way(mse=2.4, static_groups=True, **by_activation)
        ),
    }


PEERS = {
    "onnxruntime": onnxruntime_ways,
    "llmcompressor": llmcompressor_ways,
    "gptqmodel": gptqmodel_ways,
}


def _module(torch: Any, weight: F32) -> Any:
    module = torch.nn.Linear(*weight.shape, bias=False)
    module.weight.data = torch.from_numpy(np.ascontiguousarray(weight.T))
    return module


def activations(
    hidden: list[F32], layer: Layer, config: ModelConfig
) -> Iterator[tuple[str, list[F32]]]:
    """What each group of the layer's linears reads, batch by batch; `hidden` moves behind it."""
    passes = [layer_steps(x, layer, config) for x in hidden]
    for reads in dict.fromkeys(spec.reads for spec in LINEARS):
        steps = [next(one) for one in passes]
        assert all(step.reads == reads for step in steps)
        yield (
            reads,
            [step.activations().reshape(-1, step.activations().shape[-1]) for step in steps],
        )
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
    batches = [Moments.of(x, x, np.zeros((len(x), outputs), np.float32)) for x in shown]
    moments = batches[0]
    for batch in batches[1:]:
        moments.add(batch)
    (mean, second), (fresh_mean, fresh) = _moment(shown), _moment(heldout)
    cross, square = np.outer(fresh_mean, mean), np.outer(mean, mean)
    measures = (second, fresh, second - square, fresh - cross - cross.T + square)
    return Reading(
        np.concatenate(shown), second, moments, dict(zip(METRICS, measures, strict=True))
    )


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


def measure(
    ways: Mapping[str, Way], weights: Weights, found: Reading
) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Way, linear, and its errors by METRICS with the way's seconds for a linear of the group."""
    for way, prepare in ways.items():
        with contextlib.redirect_stdout(sys.stderr):  # some libraries talk
            quantize = prepare(weights, found)
            started = time.perf_counter()
            made = quantize()
            seconds = (time.perf_counter() - started) / len(weights)
        for name, weight in weights.items():
            errors = {key: error(weight, made[name], found.measures[key]) for key in METRICS}
            yield way, name, errors | {"seconds": seconds}


def study(
    checkpoint: Checkpoint, ways: Mapping[str, Way], texts: Sequence[I64], layers: int
) -> Results:
    """Way -> linear -> errors; `texts` are windows [windows, tokens] to calibrate on and held out.

    Every layer reads what the float model gives it.
    """
    embedding, config = checkpoint.tensor("transformer.wte.weight"), checkpoint.config
    streams = [
        [embedding[text[i : i + BATCH]] for i in range(0, len(text), BATCH)] for text in texts
    ]
    results: Results = {way: {} for way in ways}
    for index in range(layers):
        layer = layer_from_tensors(checkpoint.layer(index))
        both = (activations(stream, layer, config) for stream in streams)
        for (reads, shown), (_, heldout) in zip(*both, strict=True):
            specs = [spec for spec in LINEARS if spec.reads == reads]
            found = reading(shown, heldout, specs, config.n_embd)
            weights = {s.name: np.ascontiguousarray(layer.linears[s.name].weight.T) for s in specs}
            for way, name, errors in measure(ways, weights, found):
                results[way][f"{index}.{name}"] = errors
            say(f"layer {index}: {reads}")
    return results


def summary(results: Results) -> dict[str, dict[str, float]]:
    """Way -> geometric means over linears, seconds in all, and how OURS compares by linear.

    `ours_better`: on how many linears its held-out error is less; `ratio_*`: the way's held-out
    error over OURS, least and most.
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
        ratios = f"{one['ratio_min']:.2f}-{one['ratio_max']:.2f}"
        better = f"better on {one['ours_better']} of {linears}"
        yield f"{way:42}{errors}{one['seconds']:12.1f}{ratios:>12}  {better}"
    yield f"ratios: held-out error over that of '{OURS}', which is better on so many linears"


def available() -> tuple[dict[str, Way], dict[str, str | None]]:
    """The ways that this machine has, and each library's version, None where it is missing."""
    ways, versions = ours(), {"edge-rt": edge_rt.__version__}
    found: dict[str, str | None] = dict(versions)
    for name, make in PEERS.items():
        try:
            with contextlib.redirect_stdout(sys.stderr):
                ways |= make()
            found[name] = metadata.version(name)
        except ImportError as problem:
            found[name] = None
            say(f"{name} is left out: {problem}")
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
        tokens = calibration_tokens(recipes.data_dir("calib") / name, options.checkpoint, config)
        texts.append(sample_sequences(tokens, options.windows, options.tokens))
    ways, versions = available()
    results = study(checkpoint, ways, texts, options.layers or config.n_layer)
    table = summary(results)
    for line in lines(table, len(results[OURS])):
        sys.stdout.write(line + "\n")
    if options.json:
        record = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "commit": _git("rev-parse", "--short", "HEAD"),
            "uncommitted_changes": bool(_git("status", "--porcelain", "--", "edge_rt")),
            "machine": _machine(),
            "versions": versions,
            "windows": options.windows,
            "tokens": options.tokens,
            "bits": BITS,
            "group_size": GROUP,
            "summary": table,
            "linears": results,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _machine() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
        name = next(line for line in lines if line.startswith("model name")).split(":")[1].strip()
        return f"{name}, {platform.machine()}, {platform.system()}"
    return f"{platform.machine()}, {platform.system()}"


if __name__ == "__main__":
    main()
