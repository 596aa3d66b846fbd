"""Where the layers of a quantized checkpoint come from: quantized here, kept as they are, imported.

A source gives the layers in order. `make` computes one; `resume` tells it of one that an earlier
run has written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.device import Array, Device
from edge_rt.model.gptj import Head, Layer, layer_from_tensors, layer_norm
from edge_rt.quant.calibration import Moments, sample_sequences
from edge_rt.quant.curvature import Curvature
from edge_rt.quant.group import GroupQuantizer
from edge_rt.quant.layer import (
    QuantizedLayer,
    Streams,
    advance,
    on_device,
    quantize_layer,
)
from edge_rt.quant.pack import QMAX, to_half
from edge_rt.quant.packed import PackedCheckpoint
from edge_rt.recipes import QuantRecipe


class Layers(Protocol):
    """The layers of one checkpoint, in order."""

    def make(self, index: int) -> QuantizedLayer:
        """Compute layer `index`."""
        ...

    def resume(self, index: int, layer: Layer) -> None:
        """Take layer `index` as it was written: QuantizedLayer.layer."""
        ...

    def head(self, head: Head) -> Head:
        """What follows the last layer, to be stored in FP16."""
        ...


class FloatLayers:
    """Layers as they are in the checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def make(self, index: int) -> QuantizedLayer:
        """Read the layer."""
        return QuantizedLayer(layer_from_tensors(self._checkpoint.layer(index)), {}, [])

    def resume(self, index: int, layer: Layer) -> None:
        """Nothing to carry on."""

    def head(self, head: Head) -> Head:
        """As it is."""
        return head


class PackedLayers:
    """Layers that AutoAWQ or GPTQ has quantized."""

    def __init__(self, checkpoint: PackedCheckpoint) -> None:
        self._checkpoint = checkpoint

    def make(self, index: int) -> QuantizedLayer:
        """Read and repack the layer."""
        layer, linears = self._checkpoint.layer(index)
        return QuantizedLayer(layer, linears, [])

    def resume(self, index: int, layer: Layer) -> None:
        """Nothing to carry on."""

    def head(self, head: Head) -> Head:
        """As it is."""
        return head


class QuantizedLayers:
    """Layers quantized by a recipe; what the calibration text does to them is carried along.

    `tokens` is the whole calibration text; `qmax` the highest level, below 15 for studies.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: QuantRecipe,
        device: Device,
        tokens: npt.NDArray[np.int64],
        qmax: int = QMAX,
    ) -> None:
        shown = recipe.calibration
        config = checkpoint.config
        length = min(shown.tokens, config.n_positions)
        windows = sample_sequences(tokens, shown.sequences, length, shown.seed)
        step = max(1, device.batch_tokens // length)
        batches = [windows[i : i + step] for i in range(0, len(windows), step)]
        wte = checkpoint.tensor("transformer.wte.weight")
        half = to_half(wte, "the embedding").astype(np.float32)
        self._checkpoint = checkpoint
        self._streams = Streams(
            [device.array(wte[batch]) for batch in batches],
            [device.array(half[batch]) for batch in batches],
        )
        self._recipe, self._device, self._qmax = recipe, device, qmax

    def make(self, index: int) -> QuantizedLayer:
        """Quantize the layer."""
        layer = layer_from_tensors(self._checkpoint.layer(index))
        # Of the layer, not of the run: a run that goes on draws what a whole one would.
        rng = np.random.default_rng([self._recipe.calibration.seed, index])
        quantizer = GroupQuantizer(self._recipe, self._device, rng, self._qmax)
        return quantize_layer(layer, self._streams, self._checkpoint.config, quantizer)

    def resume(self, index: int, layer: Layer) -> None:
        """Move the calibration text behind the layer."""
        config, device = self._checkpoint.config, self._device
        original = on_device(layer_from_tensors(self._checkpoint.layer(index)), device)
        self._streams.floats = advance(self._streams.floats, original, config)
        served = on_device(layer, device)
        self._streams.quantized = advance(self._streams.quantized, served, config)

    def head(self, head: Head) -> Head:
        """With GPTQ, the weight and bias that serve the quantized model's last activations best.

        As for every linear (Moments.owed_by), but nothing is rounded to levels: the head only makes
        up for what the layers have lost.
        """
        device, config = self._device, self._checkpoint.config
        if self._recipe.method != "gptq":
            return head
        norm = device.array(head.ln_weight), device.array(head.ln_bias)

        def normed(x: Array) -> Array:
            return layer_norm(x, *norm, config.layer_norm_epsilon)

        moments = Moments.total(
            (normed(q), normed(f), None)
            for q, f in zip(self._streams.quantized, self._streams.floats, strict=True)
        )
        weight = device.array(head.weight).T
        owed = moments.owed_by(weight, residual=False)
        fitted = weight + Curvature.of(moments.scatter).solve(owed)
        shift = device.numpy(moments.bias(weight, fitted, residual=False))
        return replace(head, weight=device.numpy(fitted).T, bias=head.bias + shift)
