"""The head that serves a quantized model, against least squares in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.device import Device
from edge_rt.model.gptj import Head, head_from_tensors, layer_from_tensors, layer_norm
from edge_rt.quant.calibration import sample_sequences
from edge_rt.quant.curvature import DAMPING
from edge_rt.quant.layer import advance
from edge_rt.quant.pack import QMAX
from edge_rt.quant.source import QuantizedLayers
from edge_rt.recipes import CalibrationText, QuantRecipe

F64 = npt.NDArray[np.float64]


def last_activations(
    checkpoint: Checkpoint, method: Literal["rtn", "gptq"], tokens: npt.NDArray[np.int64]
) -> tuple[F64, F64, Head, Head]:
    """What the head reads in the quantized and in the float model, and the head of each."""
    config, shown = checkpoint.config, CalibrationText(sequences=16, tokens=48)
    recipe = QuantRecipe(method=method, awq=False, group_size=32, calibration=shown)
    source = QuantizedLayers(checkpoint, recipe, Device.open(), tokens, QMAX)
    windows = sample_sequences(tokens, shown.sequences, shown.tokens, shown.seed)
    floats = [checkpoint.tensor("transformer.wte.weight")[windows]]
    quantized = [floats[0].astype(np.float16).astype(np.float32)]
    for index in range(config.n_layer):
        floats = advance(floats, layer_from_tensors(checkpoint.layer(index)), config)
        quantized = advance(quantized, source.make(index).layer, config)
    head = head_from_tensors(checkpoint.tensor)
    read = [
        layer_norm(x[0], head.ln_weight, head.ln_bias, config.layer_norm_epsilon)
        .reshape(-1, config.n_embd)
        .astype(np.float64)
        for x in (quantized, floats)
    ]
    return read[0], read[1], head, source.head(head)


@pytest.fixture
def tokens() -> npt.NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, 96, 4000)


def test_the_head_of_gptq_is_the_damped_least_squares(
    random_gptj: Callable[..., Path], tokens: npt.NDArray[np.int64]
) -> None:
    checkpoint = Checkpoint.open(random_gptj(64, 2, 16))
    q, f, head, found = last_activations(checkpoint, "gptq", tokens)
    weight, bias = head.weight.astype(np.float64), head.bias.astype(np.float64)
    # Bias and weight together are the least squares of what is centred; only the change is damped.
    centred, lacking = q - q.mean(0), (f - f.mean(0)) @ weight.T - (q - q.mean(0)) @ weight.T
    scatter = centred.T @ centred
    damped = scatter + DAMPING * np.trace(scatter) / len(scatter) * np.eye(len(scatter))
    expected = weight + np.linalg.solve(damped, centred.T @ lacking).T
    shift = (f @ weight.T).mean(0) - (q @ expected.T).mean(0)
    change = np.abs(expected - weight).max()
    assert change > 1e-3
    np.testing.assert_allclose(found.weight, expected, atol=change / 100)
    np.testing.assert_allclose(found.bias, bias + shift, atol=np.abs(shift).max() / 100)
    wanted = f @ weight.T + bias
    before = np.linalg.norm(q @ weight.T + bias - wanted)
    after = np.linalg.norm(q @ found.weight.T + found.bias - wanted)
    assert after < 0.95 * before


def test_the_head_of_rtn_is_the_checkpoints(
    random_gptj: Callable[..., Path], tokens: npt.NDArray[np.int64]
) -> None:
    checkpoint = Checkpoint.open(random_gptj(64, 2, 16))
    *_, head, found = last_activations(checkpoint, "rtn", tokens)
    np.testing.assert_array_equal(found.weight, head.weight)
    np.testing.assert_array_equal(found.bias, head.bias)
