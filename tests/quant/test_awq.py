"""Against a float64 formulation in loops, made from the data and not from their moments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from edge_rt.model.device import Device
from edge_rt.quant import awq

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
QMAX = 15
GROUP = 16
ALPHAS = [0.05 * step for step in range(20)]


def activations(rng: np.random.Generator, tokens: int, inputs: int) -> F64:
    """Channels of very different size, as a layer norm with trained weights leaves them."""
    common = rng.normal(size=(tokens, 2)) @ rng.normal(size=(2, inputs))
    return (common + rng.normal(size=(tokens, inputs))) * np.exp(1.5 * rng.normal(size=inputs))


def normal(rng: np.random.Generator, inputs: int, outputs: int) -> F32:
    return rng.normal(size=(inputs, outputs)).astype(np.float32)


def moments(x: F64) -> tuple[F64, F64]:
    return x.T @ x / len(x), np.abs(x).mean(axis=0)


def plain_scales(magnitude: F64, alpha: float, salient: Sequence[int]) -> F64:
    mean = magnitude.mean()
    raised = [max(m / mean, 1e-4) ** alpha if mean else 1.0 for m in magnitude]
    middle = (max(raised) * min(raised)) ** 0.5
    return np.array([1.0 if c in salient else s / middle for c, s in enumerate(raised)])


def plain_rtn(weight: F64, salient: Sequence[int]) -> F64:
    """[inputs, outputs] rounded to nearest, salient channels as they are."""
    result = weight.copy()
    for start in range(0, len(weight), GROUP):
        members = [c for c in range(start, min(start + GROUP, len(weight))) if c not in salient]
        for n in range(weight.shape[1] if members else 0):
            w = weight[members, n]
            low, high = min(w.min(), 0.0), max(w.max(), 0.0)
            scale = float(np.float16(max((high - low) / QMAX, 2.0**-24)))
            zero = np.rint(-low / scale)
            result[members, n] = (np.clip(np.rint(w / scale) + zero, 0, QMAX) - zero) * scale
    return result


def plain_errors(
    weights: Sequence[F32], x: F64, magnitude: F64, salient: Sequence[int]
) -> list[float]:
    """The mean square error of all outputs for each alpha, from the products themselves."""
    result = []
    for alpha in ALPHAS:
        factors = plain_scales(magnitude, alpha, salient)[:, None]
        error = 0.0
        for weight in weights:
            exact = weight.astype(np.float64)
            served = plain_rtn(exact * factors, salient) / factors
            error += float(np.mean((x @ (exact - served)) ** 2, axis=0).sum())
        result.append(error)
    return result


@pytest.mark.parametrize("alpha", [0.0, 0.35, 0.95])
@pytest.mark.parametrize("salient", [[], [0, 7]])
def test_scales_are_the_plain_formulation(alpha: float, salient: list[int]) -> None:
    magnitude = np.random.default_rng(0).lognormal(0, 3, 40)
    magnitude[5] = 0.0
    found = awq.scales(magnitude, alpha, salient)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, plain_scales(magnitude, alpha, salient), rtol=1e-6)
    assert (found[salient] == 1).all()
    assert (found > 0).all()


def test_no_activation_at_all_is_not_scaled() -> None:
    assert awq.scales(np.zeros(5), 0.5, [2]).tolist() == [1.0] * 5
    found = awq.search(
        [np.ones((5, 2), np.float32)], np.zeros((5, 5)), np.zeros(5), [], group_size=32, qmax=QMAX
    )
    assert found.alpha == 0.0
    assert found.scales.tolist() == [1.0] * 5


@pytest.mark.parametrize("salient", [[], [2, 30]])
def test_search_is_the_plain_formulation(salient: list[int]) -> None:
    """The same exponent; where two are equally good, one whose float64 error is as low."""
    rng = np.random.default_rng(1)
    chosen: list[float] = []
    same = 0
    for _ in range(12):
        inputs = int(rng.integers(31, 50))
        x = activations(rng, 60, inputs)
        if len(chosen) % 3 == 2:
            x[:, 4] = 0.0
        weights = [normal(rng, inputs, 7), normal(rng, inputs, 4)]
        hessian, magnitude = moments(x)
        found = awq.search(weights, hessian, magnitude, salient, group_size=GROUP, qmax=QMAX)
        errors = plain_errors(weights, x, magnitude, salient)
        position = round(found.alpha * 20)
        assert found.alpha == pytest.approx(ALPHAS[position])
        assert errors[position] == pytest.approx(min(errors), rel=1e-4)
        assert errors[position] <= errors[0] * (1 + 1e-5), "worse than not to scale"
        same += position == int(np.argmin(errors))
        chosen.append(found.alpha)
        np.testing.assert_allclose(
            found.scales, plain_scales(magnitude, found.alpha, salient), rtol=1e-6
        )
    assert same >= 11
    assert len(set(chosen)) > 2, "the data do not tell exponents apart"


def test_search_helps_where_few_channels_are_large() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(200, 64))
    x[:, [3, 20, 50]] *= 30
    hessian, magnitude = moments(x)
    weight = normal(rng, 64, 16)
    found = awq.search([weight], hessian, magnitude, [], group_size=GROUP, qmax=QMAX)
    errors = plain_errors([weight], x, magnitude, [])
    assert errors[round(found.alpha * 20)] < 0.5 * errors[0]
    assert found.scales[3] > 2 * found.scales[4]


def test_equal_magnitudes_are_not_scaled() -> None:
    rng = np.random.default_rng(3)
    hessian, _ = moments(rng.normal(size=(50, 20)))
    found = awq.search(
        [normal(rng, 20, 5)], hessian, np.full(20, 0.7), [4], group_size=GROUP, qmax=QMAX
    )
    assert found.alpha == 0.0
    np.testing.assert_array_equal(found.scales, np.ones(20))


@pytest.mark.parametrize("salient", [[], [5]])
def test_an_activation_far_out(salient: list[int]) -> None:
    rng = np.random.default_rng(4)
    x = activations(rng, 100, 20)
    x[:, 5] *= 1e4
    x[:, 6] = 0.0
    hessian, magnitude = moments(x)
    weight = normal(rng, 20, 5)
    found = awq.search([weight], hessian, magnitude, salient, group_size=GROUP, qmax=QMAX)
    assert np.isfinite(found.scales).all()
    assert (found.scales > 0).all()
    errors = plain_errors([weight], x, magnitude, salient)
    assert errors[round(found.alpha * 20)] <= errors[0] * (1 + 1e-5)


def test_no_weight_is_lifted_beyond_fp16() -> None:
    """In an output that the search does not look at, where unscaled weights would do."""
    rng = np.random.default_rng(6)
    x = activations(rng, 100, 20)
    x[:, 5] *= 100
    hessian, magnitude = moments(x)
    weight = normal(rng, 20, 1100)
    free = awq.search([weight], hessian, magnitude, [], group_size=GROUP, qmax=QMAX)
    assert free.scales[5] > 3
    weight[5, 1] = -30000.0
    held = awq.search([weight], hessian, magnitude, [], group_size=GROUP, qmax=QMAX)
    assert 0 < held.alpha < free.alpha
    assert 30000 * held.scales[5] <= 65504
    weight[5, 1] = -70000.0
    held = awq.search([weight], hessian, magnitude, [], group_size=GROUP, qmax=QMAX)
    assert held.alpha == 0.0


def test_many_outputs_are_sampled() -> None:
    """Of 1,100 outputs every other one is looked at: the rest may be anything."""
    rng = np.random.default_rng(5)
    x = activations(rng, 100, 20)
    hessian, magnitude = moments(x)
    weight = normal(rng, 20, 1100)
    errors = plain_errors([weight[:, ::2]], x, magnitude, [])
    weight[:, 1::2] = 0.0
    found = awq.search([weight], hessian, magnitude, [], group_size=GROUP, qmax=QMAX)
    assert errors[round(found.alpha * 20)] == pytest.approx(min(errors), rel=1e-4)
    assert min(errors) < 0.9 * errors[0]


@pytest.mark.parametrize("seed", range(4))
def test_torch_does_the_same(seed: int) -> None:
    """The same exponent and salient channels at 1, scales to 1e-6."""
    rng = np.random.default_rng(seed)
    hessian, magnitude = moments(activations(rng, 100, 40))
    weights = [normal(rng, 40, 7), normal(rng, 40, 4)]
    device = Device.open("torch-cpu")
    moved = [device.array(weight) for weight in weights]
    found = awq.search(weights, hessian, magnitude, [1, 9], group_size=GROUP, qmax=QMAX)
    theirs = awq.search(
        moved, device.array(hessian), device.array(magnitude), [1, 9], group_size=GROUP, qmax=QMAX
    )
    assert theirs.alpha == found.alpha
    np.testing.assert_allclose(device.numpy(theirs.scales), found.scales, rtol=1e-6)
    assert (theirs.scales[[1, 9]] == 1).all()
