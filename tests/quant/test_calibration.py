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
        start, found = 0, None
        for sequences, length in ((2, 40), (3, 30), (1, 7)):
            part = slice(start, start + sequences * length)
            batch = Moments.of(
                *(where.array(x[part].reshape(sequences, length, -1)) for x in self.exact32())
            )
            start += sequences * length
            if found is None:
                found = batch
            else:
                found.add(batch)
        assert found is not None
        self.moments: Moments = found

    def exact32(self) -> tuple[F32, F32, F32]:
        return self.q, self.f, self.r

    def exact(self) -> tuple[F64, F64, F64]:
        q, f, r = (x.astype(np.float64) for x in self.exact32())
        return q, f, r

    def wanted_weight(self, damping: float, *, residual: bool) -> F64:
        """Least squares on the centred data, with rows that hold the change near zero."""
        q, f, r = (x - x.mean(axis=0) for x in self.exact())
        outputs = (f - q) @ self.weight.astype(np.float64) + (r if residual else 0.0)
        ridge = np.sqrt(damping * np.mean(q**2) * len(q)) * np.eye(INPUTS)
        rows = np.vstack([q, ridge])
        change = np.linalg.lstsq(rows, np.vstack([outputs, np.zeros((INPUTS, OUTPUTS))]))[0]
        return self.weight + change


@pytest.mark.parametrize("device", ["cpu", "torch-cpu"])
@pytest.mark.parametrize("seed", range(3))
def test_moments_are_those_of_numpy(seed: int, device: str) -> None:
    data = Data(seed, device=device)
    q, f, r = data.exact()
    moments = data.moments
    assert moments.count == len(q)
    expected: Mapping[str, F64] = {
        "covariance": np.cov(q.T, bias=True),
        "mean_square": q.T @ q / len(q),
        "mean_magnitude": np.abs(q).mean(axis=0),
        "q": q.sum(axis=0),
        "f": f.sum(axis=0),
        "r": r.sum(axis=0),
    }
    for name, value in expected.items():
        found = np.asarray(getattr(moments, name))
        assert found.dtype == np.float64, name
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5 * np.abs(value).max())


@pytest.mark.parametrize("large", [1e4, 1e6])
def test_a_large_mean_hides_no_variance(large: float) -> None:
    """Of two channels with a large mean one is constant; float32 holds neither's square."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 4)).astype(np.float32)
    x[:, 1] = large
    x[:, 2] += large
    none = x[:, :0]
    moments = Moments.of(x[:2000], x[:2000], none[:2000])
    moments.add(Moments.of(x[2000:], x[2000:], none[2000:]))
    exact = x.astype(np.float64)
    expected = np.cov(exact.T, bias=True)
    np.testing.assert_allclose(moments.covariance, expected, rtol=1e-4, atol=1e-4)
    assert moments.covariance[1, 1] == 0.0
    np.testing.assert_allclose(moments.mean_square, exact.T @ exact / 3000, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", "torch-cpu"])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("damping", [0.1, 1e-3])
def test_target_is_the_least_squares_solution(damping: float, residual: bool, device: str) -> None:
    for seed in range(3):
        data = Data(seed, device=device)
        weight = Device.open(device).array(data.weight)  # type: ignore[arg-type]
        found = np.asarray(data.moments.target(weight, damping, residual=residual))
        expected = data.wanted_weight(damping, residual=residual)
        assert found.dtype == np.float32
        assert np.abs(expected - data.weight).max() > 0.05, "nothing to make up for"
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_target_makes_up_for_more_the_less_it_is_held() -> None:
    data = Data(3)
    q, f, r = (x - x.mean(axis=0) for x in data.exact())
    wanted = f @ data.weight.astype(np.float64) + r
    weights = [data.weight]
    weights += [data.moments.target(data.weight, d, residual=True) for d in (10.0, 0.1, 1e-4)]
    lost = [float(np.mean((wanted - q @ weight) ** 2)) for weight in weights]
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] < 0.9 * lost[0]


def test_nothing_is_made_up_for_where_nothing_was_lost() -> None:
    data = Data(4, disturbed=False)
    found = data.moments.target(data.weight, 0.1, residual=True)
    np.testing.assert_array_equal(found, data.weight)


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
    moments = Moments.of(x, x, x[:, :OUTPUTS])
    weight = Data(6).weight
    moments.check("ln_1")
    assert (moments.covariance == 0).all()
    np.testing.assert_array_equal(moments.target(weight, 0.1, residual=True), weight)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("batch", [0, 1])
def test_activations_that_are_not_finite_are_refused(value: float, batch: int) -> None:
    """1e30: neither the square nor what comes of it is finite."""
    x = np.random.default_rng(7).normal(size=(2, 30, 4)).astype(np.float32)
    x[batch, [3, 4], 2] = [value, -value]
    moments = Moments.of(x[0], x[0], x[0])
    moments.add(Moments.of(x[1], x[1], x[1]))
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
            moments = Moments.of(found, found, found[..., :0])
            magnitude = np.abs(expected).mean((0, 1), dtype=np.float64)
            np.testing.assert_allclose(moments.mean_magnitude, magnitude, rtol=1e-4, atol=1e-6)
        hidden = gptj.forward_layer(hidden, layer, checkpoint.config)
