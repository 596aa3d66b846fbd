"""Quantizing one decoder layer: group by group of linears that read the same activations.

Each group is calibrated on what it will read: the layers before it, and the groups of this layer
before it, are quantized by then.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_rt.model.device import Array, Device
from edge_rt.model.gptj import (
    LINEARS,
    Layer,
    Linear,
    LinearSpec,
    ModelConfig,
    Step,
    forward_layer,
    in_features,
    layer_steps,
    value_rows,
)
from edge_rt.quant.calibration import Moments
from edge_rt.quant.group import GroupQuantizer, QuantizedGroup
from edge_rt.quant.pack import QuantizedLinear, pack, scale_outputs
from edge_rt.quant.report import LinearReport

_Pass = Generator[Step, Mapping[str, Linear] | None, Array]


@dataclass(slots=True)
class Streams:
    """The calibration text on its way through the layers, in batches [sequences, tokens, n_embd].

    `floats` as the float model computes it, `quantized` as the one quantized so far does.
    """

    floats: list[Array]
    quantized: list[Array]


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A layer as it is stored.

    `layer` is what an engine computes, in float32: the norm with scales folded in, the linears
    dequantized. `linears` are those that are quantized, `reports` how they fared.
    """

    layer: Layer
    linears: dict[str, QuantizedLinear]
    reports: list[LinearReport]


def on_device(layer: Layer, device: Device) -> Layer:
    """`layer` with its arrays on the device."""

    def move(x: npt.NDArray[np.float32] | None) -> Array | None:
        return None if x is None else device.array(x)

    linears = {
        name: Linear(device.array(linear.weight), move(linear.bias), move(linear.post_scale))
        for name, linear in layer.linears.items()
    }
    return Layer(device.array(layer.ln_weight), device.array(layer.ln_bias), linears)


def advance(hidden: Iterable[Array], layer: Layer, config: ModelConfig) -> list[Array]:
    """`hidden` batches behind `layer`, whose arrays are on their device."""
    return [forward_layer(x, layer, config) for x in hidden]


def quantize_layer(
    layer: Layer, streams: Streams, config: ModelConfig, quantizer: GroupQuantizer
) -> QuantizedLayer:
    """Quantize `layer`, which is in host memory, and move both streams behind it."""
    device = quantizer.device
    moved = on_device(layer, device)
    float_passes = [layer_steps(x, moved, config) for x in streams.floats]
    passes = [layer_steps(x, moved, config) for x in streams.quantized]
    groups: dict[str, QuantizedGroup] = {}
    serving: Mapping[str, Linear] | None = None
    for reads in dict.fromkeys(spec.reads for spec in LINEARS):
        specs = [spec for spec in LINEARS if spec.reads == reads]
        moments = _moments(passes, float_passes, serving, specs)
        groups[reads] = quantizer.quantize(specs, moved.linears, moments)
        serving = groups[reads].serving()
    streams.floats = [_finish(one) for one in float_passes]
    result = _stored(layer, groups, config, device)
    # Through what is stored, not through `serving`: so that a run that goes on from stored layers
    # computes the same bits.
    streams.quantized = advance(streams.quantized, on_device(result.layer, device), config)
    return result


def _moments(
    passes: Sequence[_Pass],
    float_passes: Sequence[_Pass],
    serving: Mapping[str, Linear] | None,
    specs: Sequence[LinearSpec],
) -> Moments:
    """Move all passes to the next stop and sum up what `specs` will read there."""

    def batches() -> Iterator[tuple[Array, Array, Array | None]]:
        for one, float_one in zip(passes, float_passes, strict=True):
            step, float_step = one.send(serving), float_one.send(None)
            assert step.reads == specs[0].reads, "LINEARS are in the order in which a layer reads"
            lacking = None
            if any(spec.residual for spec in specs):
                lacking = float_step.residual() - step.residual()
            yield step.activations(), float_step.activations(), lacking

    moments = Moments.total(batches())
    moments.check(specs[0].reads)
    return moments


def _finish(one: _Pass) -> Array:
    try:
        next(one)
    except StopIteration as done:
        return done.value
    raise AssertionError("a layer ends behind its last group")


def _stored(
    layer: Layer, groups: Mapping[str, QuantizedGroup], config: ModelConfig, device: Device
) -> QuantizedLayer:
    """Pack the groups and fold their scales into what comes before them."""
    linears: dict[str, QuantizedLinear] = {}
    reports: list[LinearReport] = []
    for group in groups.values():
        for name, one in group.weights.items():
            linears[name] = pack(
                device.numpy(one.weight).T,
                replace(
                    one.grid,
                    scales=device.numpy(one.grid.scales),
                    zeros=device.numpy(one.grid.zeros),
                ),
                group.salient,
                None if one.bias is None else device.numpy(one.bias),
            )
        reports += group.reports
    scales: dict[str, Any] = {reads: device.numpy(group.scales) for reads, group in groups.items()}
    values = np.ones(linears["attn_qkv"].scales.shape[0], np.float32)
    values[value_rows(config)] /= scales["attention"]
    linears["attn_qkv"] = scale_outputs(linears["attn_qkv"], values)
    behind_gelu = linears["mlp_fc_in"].post_scale / scales["gelu"]
    linears["mlp_fc_in"] = replace(linears["mlp_fc_in"], post_scale=behind_gelu)
    served = Layer(
        layer.ln_weight / scales["ln_1"],
        layer.ln_bias / scales["ln_1"],
        {spec.name: linears[spec.name].linear(in_features(spec, config)) for spec in LINEARS},
    )
    return QuantizedLayer(served, linears, reports)
