"""Moments against NumPy in float64, on the data themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import GPTJForCausalLM

from edge_rt.errors import CheckpointError, ConfigError
from edge_rt.model import gptj
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.device import Device
from edge_rt.quant.calibration import Moments, sample_sequences
from edge_rt.quant.curvature import Curvature

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
INPUTS, OUTPUTS = 12, 5


def test_windows_are_spread_without_overlap() -> None:
    windows = sample_sequences(np.arange(1000), sequences=4, length=100)
    assert windows[:, 0].tolist() == [0, 300, 600, 900]
    assert windows.shape == (4, 100)


def test_a_seed_draws_other_windows_each_time() -> None:
    text = np.arange(10_000)
    drawn = {seed: sample_sequences(text, sequences=20, length=100, seed=seed) for seed in range(5)}
    for seed, windows in drawn.items():
        starts = windows[:, 0]
        assert (starts % 100 == 0).all()
        assert (np.diff(starts) > 0).all(), "in the text's order, none twice"
        np.testing.assert_array_equal(windows, starts[:, None] + np.arange(100))
        again = sample_sequences(text, sequences=20, length=100, seed=seed)
        np.testing.assert_array_equal(again, windows)
    assert len({windows.tobytes() for windows in drawn.values()}) == 5


@pytest.mark.parametrize("seed", [None, 0])
def test_fewer_windows_where_the_text_is_short(seed: int | None) -> None:
    windows = sample_sequences(np.arange(250), sequences=64, length=100, seed=seed)
    assert windows[:, 0].tolist() == [0, 100]


@pytest.mark.parametrize("tokens", [0, 1, 99])
def test_too_little_text_is_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"has {tokens} tokens, less than one sequence of 100"):
        sample_sequences(np.arange(tokens), sequences=1, length=100)


class Data:
    """What three batches of unequal size read, and their moments; q is a disturbed f."""

    def __init__(self, seed: int, *, disturbed: bool = True, device: str = "cpu") -> None:
        rng = np.random.default_rng(seed)
        tokens = 2 * 40 + 3 * 30 + 1 * 7
        mixed = rng.normal(size=(tokens, INPUTS)) @ rng.normal(size=(INPUTS, INPUTS))
        f = mixed + 3 * rng.normal(size=INPUTS)
        q = 0.9 * f + 0.3 * rng.normal(size=f.shape) + 0.2 if disturbed else f
        r = f[:, :OUTPUTS] * 0.1 + rng.normal(size=(tokens, OUTPUTS)) - 0.5
        self.q, self.f, self.r = (x.astype(np.float32) for x in (q, f, r if disturbed else 0 * r))
        self.weight = rng.normal(size=(INPUTS, OUTPUTS)).astype(np.float32)
        where = Device.open(device)  # type: ignore[arg-type]
        batches, start = [], 0
        for sequences, length in ((2, 40), (3, 30), (1, 7)):
            part = slice(start, start + sequences * length)
            of_batch = (x[part].reshape(sequences, length, -1) for x in self.exact32())
            batches.append(tuple(where.array(x) for x in of_batch))
            start += sequences * length
        self.moments = Moments.total(batches)  # type: ignore[arg-type]

    def exact32(self) -> tuple[F32, F32, F32]:
        return self.q, self.f, self.r

    def exact(self) -> tuple[F64, F64, F64]:
        q, f, r = (x.astype(np.float64) for x in self.exact32())
        return q, f, r

    def change(self, *, residual: bool) -> F64:
        """Least squares on the centred data, with rows that hold the change near zero."""
        q, f, r = (x - x.mean(axis=0) for x in self.exact())
        outputs = (f - q) @ self.weight.astype(np.float64) + (r if residual else 0.0)
        ridge = np.sqrt(0.1 * np.mean(q**2) * len(q)) * np.eye(INPUTS)
        rows = np.vstack([q, ridge])
        return np.linalg.lstsq(rows, np.vstack([outputs, np.zeros((INPUTS, OUTPUTS))]))[0]


@pytest.mark.parametrize("device", ["cpu", "torch-cpu"])
@pytest.mark.parametrize("seed", range(3))
def test_moments_are_those_of_numpy(seed: int, device: str) -> None:
    data = Data(seed, device=device)
    q, f, r = data.exact()
    moments = data.moments
    assert moments.count == len(q)
    centred_q, centred_f, centred_r = (x - x.mean(axis=0) for x in (q, f, r))
    expected: Mapping[str, F64] = {
        "scatter": centred_q.T @ centred_q,
        "drift": centred_q.T @ (centred_f - centred_q),
        "owed": centred_q.T @ centred_r,
        "mean_magnitude": np.abs(q).mean(axis=0),
        "q": q.sum(axis=0),
        "lost": (f - q).sum(axis=0),
        "residual": r.sum(axis=0),
    }
    for name, value in expected.items():
        found = np.asarray(getattr(moments, name))
        assert found.dtype == (np.float32 if name in ("drift", "owed") else np.float64), name
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5 * np.abs(value).max())
    found = np.asarray(moments.about_zero())
    np.testing.assert_allclose(found, q.T @ q, rtol=1e-5, atol=1e-5 * np.abs(found).max())


@pytest.mark.parametrize("large", [1e4, 1e6])
def test_a_large_mean_hides_no_variance(large: float) -> None:
    """Of two channels with a large mean one is constant; float32 holds neither's square."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 4)).astype(np.float32)
    x[:, 1] = large
    x[:, 2] += large
    moments = Moments.total((x[part], x[part], None) for part in (slice(2000), slice(2000, None)))
    exact = x.astype(np.float64)
    centred = exact - exact.mean(axis=0)
    np.testing.assert_allclose(moments.scatter, centred.T @ centred, rtol=1e-4, atol=0.3)
    assert moments.scatter[1, 1] == 0.0
    np.testing.assert_allclose(moments.about_zero(), exact.T @ exact, rtol=1e-6, atol=0.3)


@pytest.mark.parametrize("device", ["cpu", "torch-cpu"])
@pytest.mark.parametrize("residual", [True, False])
def test_what_is_owed_is_made_up_for_by_the_least_squares(residual: bool, device: str) -> None:
    for seed in range(3):
        data = Data(seed, device=device)
        weight = Device.open(device).array(data.weight)  # type: ignore[arg-type]
        owed = data.moments.owed_by(weight, residual=residual)
        found = np.asarray(Curvature.of(data.moments.scatter).solve(owed))
        expected = data.change(residual=residual)
        assert found.dtype == np.float32
        assert np.abs(expected).max() > 0.05, "nothing to make up for"
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_nothing_is_owed_where_nothing_was_lost() -> None:
    data = Data(4, disturbed=False)
    owed = data.moments.owed_by(data.weight, residual=True)
    assert (owed == 0).all()


@pytest.mark.parametrize("residual", [True, False])
def test_bias_keeps_the_mean_output(residual: bool) -> None:
    data = Data(5)
    quantized = np.round(data.weight * 2) / 2
    bias = data.moments.bias(data.weight, quantized, residual=residual)
    q, f, r = data.exact()
    found = (q @ quantized + bias).mean(axis=0)
    expected = (f @ data.weight.astype(np.float64)).mean(axis=0) + residual * r.mean(axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(bias).max() > 0.1


@pytest.mark.parametrize("value", [0.0, 2.5])
def test_channels_that_never_vary(value: float) -> None:
    x = np.full((50, INPUTS), value, np.float32)
    moments = Moments.total([(x, x, x[:, :OUTPUTS])])
    moments.check("ln_1")
    assert (moments.scatter == 0).all()
    assert (moments.owed_by(Data(6).weight, residual=True) == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("batch", [0, 1])
def test_activations_that_are_not_finite_are_refused(value: float, batch: int) -> None:
    """1e30: neither the square nor what comes of it is finite."""
    x = np.random.default_rng(7).normal(size=(2, 30, 4)).astype(np.float32)
    x[batch, [3, 4], 2] = [value, -value]
    moments = Moments.total((part, part, part) for part in x)
    with pytest.raises(CheckpointError, match="activations 'ln_1' are not finite"):
        moments.check("ln_1")


def test_finite_activations_pass() -> None:
    Data(8).moments.check("ln_1")


def test_what_linears_read_is_what_transformers_feed_them(demo_checkpoint: Path) -> None:
    tokens = np.random.default_rng(0).integers(1, 3072, (6, 48))
    model: Any = GPTJForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32)
    model.eval()
    seen: dict[tuple[int, str], F32] = {}
    modules = {"ln_1": "attn.q_proj", "attention": "attn.out_proj", "gelu": "mlp.fc_out"}

    def watch(index: int, reads: str) -> None:
        def hook(_module: object, inputs: tuple[Any, ...]) -> None:
            seen[index, reads] = inputs[0].numpy()

        block = model.transformer.h[index]
        block.get_submodule(modules[reads]).register_forward_pre_hook(hook)

    for index in (0, 1):
        for reads in modules:
            watch(index, reads)
    with torch.no_grad():
        model(torch.from_numpy(tokens))

    checkpoint = Checkpoint.open(demo_checkpoint)
    hidden = checkpoint.tensor("transformer.wte.weight")[tokens].astype(np.float32)
    for index in (0, 1):
        layer = gptj.layer_from_tensors(checkpoint.layer(index))
        steps = gptj.layer_steps(hidden, layer, checkpoint.config)
        for reads in modules:
            step = next(steps)
            assert step.reads == reads
            found = step.activations()
            expected = seen[index, reads]
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
            moments = Moments.total([(found, found, None)])
            magnitude = np.abs(expected).mean((0, 1), dtype=np.float64)
            np.testing.assert_allclose(moments.mean_magnitude, magnitude, rtol=1e-4, atol=1e-6)
        hidden = gptj.forward_layer(hidden, layer, checkpoint.config)
