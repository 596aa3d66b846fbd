"""Against Frantar et al.'s algorithm as the paper writes it, in float64 with explicit inverses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from edge_rt.errors import CheckpointError
from edge_rt.model.device import Device
from edge_rt.quant.curvature import Curvature
from edge_rt.quant.gptq import _absorb, _descend, _sweep, gptq
from edge_rt.quant.grid import Grid, fit
from edge_rt.quant.pack import pack

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
QMAX = 15


def correlated(rng: np.random.Generator, tokens: int, inputs: int) -> F64:
    """Activations whose channels have part in common and differ much in size."""
    common = rng.normal(size=(tokens, 3)) @ rng.normal(size=(3, inputs))
    sizes = np.exp(rng.normal(size=inputs))
    return (common + rng.normal(size=(tokens, inputs))) * sizes


def normal(rng: np.random.Generator, inputs: int, outputs: int) -> F32:
    return rng.normal(size=(inputs, outputs)).astype(np.float32)


def moment(x: F64) -> F64:
    return x.T @ x / len(x)


def pick(rng: np.random.Generator, inputs: int, fraction: float) -> list[int]:
    count = max(1, round(inputs * fraction)) if fraction else 0
    return sorted(rng.choice(inputs, count, replace=False).tolist())


def output_errors(difference: npt.NDArray[np.floating], hessian: F64) -> F64:
    """tr(E H E^T) of each output."""
    exact = difference.astype(np.float64)
    return np.einsum("in,ij,jn->n", exact, hessian, exact)


def damp(hessian: F64, salient: list[int]) -> F64:
    """10 % of the mean diagonal of the channels that are rounded."""
    rest = [c for c in range(len(hessian)) if c not in salient]
    return hessian + 0.1 * np.diagonal(hessian)[rest].mean() * np.eye(len(hessian))


def fit_one(weight: F64, importance: F64) -> tuple[float, float]:
    """Scale and zero point of one group of one output: the least error of 16 clips."""
    low, high = min(weight.min(), 0.0), max(weight.max(), 0.0)
    best, found = np.inf, (0.0, 0.0)
    for clip in (1.0 - 0.03 * step for step in range(16)):
        scale = float(np.float16(max((high - low) * clip / QMAX, 2.0**-24)))
        zero = float(np.clip(np.rint(-low * clip / scale), 0, QMAX))
        rounded = (np.clip(np.rint(weight / scale) + zero, 0, QMAX) - zero) * scale
        error = float(importance @ (weight - rounded) ** 2)
        if error < best:
            best, found = error, (scale, zero)
    return found


def textbook(weight: F32, hessian: F64, salient: Sequence[int], group_size: int) -> F64:
    """GPTQ of one output [inputs] after another, the inverse Hessian shrunk channel by channel."""
    inputs = len(hessian)
    order = [c for c in range(inputs) if c not in salient] + list(salient)
    result = np.zeros(weight.shape)
    for n in range(weight.shape[1]):
        w = weight[:, n].astype(np.float64)
        inverse = np.linalg.inv(damp(hessian, salient))
        group, scale, zero = -1, 0.0, 0.0
        for position, c in enumerate(order):
            if c in salient:
                result[c, n] = np.float16(w[c])
            else:
                if c // group_size != group:
                    group = c // group_size
                    members = [j for j in order if j // group_size == group and j not in salient]
                    scale, zero = fit_one(w[members], np.diagonal(hessian)[members])
                level = min(max(np.rint(w[c] / scale) + zero, 0), QMAX)
                result[c, n] = (level - zero) * scale
            ahead = order[position + 1 :]
            w[ahead] -= (w[c] - result[c, n]) / inverse[c, c] * inverse[c, ahead]
            inverse -= np.outer(inverse[:, c], inverse[c, :]) / inverse[c, c]
    return result


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("dead", [False, True])
def test_sweep_is_the_textbook_loop(fraction: float, dead: bool) -> None:
    """Output by output, where no tie of two levels or clips is decided by float32.

    Such a tie changes what follows it. It is rare, and the error is then about the same.
    """
    rng = np.random.default_rng(round(fraction * 100))
    same = total = 0
    for _ in range(8):
        inputs, outputs = int(rng.integers(3, 40)), 6
        x = correlated(rng, 100, inputs)
        if dead:
            x[:, rng.integers(inputs)] = 0.0
        hessian, weight = moment(x), normal(rng, inputs, outputs)
        salient = pick(rng, inputs, fraction)
        curvature = Curvature.of(hessian, salient, 8)
        grid = fit(weight, salient, 8, QMAX, np.diagonal(curvature.hessian))
        found = _sweep(weight, curvature, grid)
        expected = textbook(weight, hessian, salient, 8)
        allowed = 1e-6 * np.abs(expected)
        allowed[salient] += 2.0**-10 * np.abs(expected[salient])  # the FP16 value beside it
        same += (np.abs(found - expected) <= allowed).all(axis=0).sum()
        total += outputs
        np.testing.assert_allclose(
            output_errors(found - weight, hessian).sum(),
            output_errors(expected - weight, hessian).sum(),
            rtol=0.25,
        )
        rest = [c for c in range(inputs) if c not in salient]
        np.testing.assert_array_equal(grid.rounded(found, salient)[rest], found[rest])
    assert same >= 0.97 * total


def quantized_at_random(
    rng: np.random.Generator, inputs: int, salient: list[int]
) -> tuple[F32, F32, F64, Grid]:
    """Weight, a poor rounding of it on a grid, and Hessian."""
    x = correlated(rng, int(rng.integers(5, 200)), inputs)
    weight = normal(rng, inputs, 8)
    grid = fit(weight, salient, 32, QMAX)
    poor = weight + rng.normal(size=weight.shape).astype(np.float32) * grid.scales.max()
    return weight, grid.rounded(poor, salient), moment(x), grid


@pytest.mark.parametrize("fraction", [0.0, 0.05])
def test_descent_never_raises_an_error(fraction: float) -> None:
    """After each of four rounds, for each output; the scales move too."""
    rng = np.random.default_rng(3)
    moved = 0.0
    for _ in range(40):
        inputs = int(rng.integers(2, 90))
        salient = pick(rng, inputs, fraction)
        weight, result, hessian, grid = quantized_at_random(rng, inputs, salient)
        curvature = replace(Curvature.of(hessian, salient, 32), damping=0.0)
        kept, scales = result[salient].copy(), grid.scales.copy()
        before = first = output_errors(weight - result, hessian)
        for _ in range(4):
            _descend(weight, result, curvature, grid)
            after = output_errors(weight - result, hessian)
            assert (after <= before * (1 + 1e-5) + 1e-6 * first).all()
            before = after
        assert after.sum() < 0.7 * first.sum() or inputs < 5
        np.testing.assert_array_equal(result[salient], kept)
        rest = [c for c in range(inputs) if c not in salient]
        np.testing.assert_allclose(
            grid.rounded(result, salient)[rest], result[rest], rtol=1e-6, atol=1e-9
        )
        moved = max(moved, float(np.abs(grid.scales / scales - 1).max()))
    assert moved > 0.01


@pytest.mark.parametrize("fraction", [0.02, 0.2, 1.0])
def test_salient_channels_make_up_for_the_others(fraction: float) -> None:
    """The least squares of the outputs, with a ridge of 1 % of the mean diagonal, in FP16."""
    rng = np.random.default_rng(4)
    for _ in range(10):
        inputs = int(rng.integers(3, 60))
        salient = pick(rng, inputs, fraction)
        x = correlated(rng, 200, inputs)
        weight = normal(rng, inputs, 5)
        result = (weight + 0.1 * normal(rng, inputs, 5)).astype(np.float32)
        before = result.copy()
        curvature = Curvature.of(moment(x), salient, 32)
        ridge = 0.01 * float(np.mean(x[:, salient] ** 2))
        _absorb(weight, result, replace(curvature, damping=ridge))
        rest = [c for c in range(inputs) if c not in salient]
        np.testing.assert_array_equal(result[rest], before[rest])
        # The outputs that the rest owes, from the data: no normal equations.
        owed = x[:, rest] @ (weight[rest] - before[rest]).astype(np.float64) / np.sqrt(len(x))
        held = np.sqrt(ridge) * np.eye(len(salient))
        stacked = np.vstack([x[:, salient] / np.sqrt(len(x)), held])
        change = np.linalg.lstsq(stacked, np.vstack([owed, np.zeros((len(salient), 5))]))[0]
        np.testing.assert_allclose(result[salient], weight[salient] + change, rtol=6e-4, atol=1e-4)


def test_nothing_to_absorb_into() -> None:
    weight, result = np.ones((4, 2), np.float32), np.zeros((4, 2), np.float32)
    _absorb(weight, result, Curvature.of(np.eye(4)))
    assert (result == 0).all()


def test_never_worse_than_rounding_to_nearest() -> None:
    """1,000 layers: for each output and in sum, however few samples or live channels there are."""
    rng = np.random.default_rng(5)
    better = 0
    for number in range(1000):
        inputs, outputs = int(np.exp(rng.uniform(np.log(3), np.log(97)))), int(rng.integers(1, 25))
        x = correlated(rng, int(rng.choice([1, 5, 30, 300])), inputs)
        x[:, rng.random(inputs) < 0.2 * (number % 3 == 0)] = 0.0
        weight = (rng.standard_t(4, (inputs, outputs)) * 0.1).astype(np.float32)
        salient = pick(rng, inputs, (0.0, 0.01, 0.05)[number % 3])
        hessian = moment(x)
        found, grid = gptq(weight, Curvature.of(hessian, salient, 32), qmax=QMAX)
        assert_stored(found, grid, salient)
        rounded = fit(weight, salient, 32, QMAX).rounded(weight, salient)
        ours = output_errors(weight - found, hessian)
        nearest = output_errors(weight - rounded, hessian)
        # What float32 may lose of the sum x (w - q): its terms, not what is left of them.
        noise = 1e-6 * output_errors(np.abs(weight - found), np.abs(hessian)) + 1e-30
        assert (ours <= nearest * (1 + 1e-5) + noise).all(), number
        assert ours.sum() <= nearest.sum() * (1 + 1e-5) + noise.sum(), number
        better += bool(ours.sum() < 0.9 * nearest.sum())
    assert better > 900


def assert_stored(weight: F32, grid: Grid, salient: Sequence[int]) -> None:
    """Everything is finite, fits its type, and comes back out of the stored form."""
    assert np.isfinite(weight).all()
    assert (grid.scales > 0).all()
    np.testing.assert_array_equal(grid.scales, grid.scales.astype(np.float16))
    np.testing.assert_array_equal(grid.zeros, np.clip(np.rint(grid.zeros), 0, QMAX))
    stored = pack(weight.T, grid, np.array(salient, np.int32))
    np.testing.assert_allclose(stored.dequantize(len(weight)).T, weight, rtol=1e-6, atol=1e-9)


def changed(weight: F32, x: F64, name: str) -> tuple[F32, F64]:
    rows, columns, factor, added = DEGENERATE[name]
    if name.endswith("activations"):
        x[:, columns] = x[:, columns] * factor + added
    else:
        weight[columns, rows] = weight[columns, rows] * factor + added
    return weight, x


EVERY, CHANNEL, MIDDLE = slice(None), slice(40, 41), slice(32, 64)
# Which outputs and channels of 70 in groups of 32, what they are multiplied with, what is added.
DEGENERATE = {
    "a group of zero weights": (EVERY, MIDDLE, 0.0, 0.0),
    "zero weights": (EVERY, EVERY, 0.0, 0.0),
    "equal weights": (EVERY, EVERY, 0.0, 0.37),
    "a weight far out": (slice(2, 3), CHANNEL, 0.0, 1e4),
    "tiny weights": (EVERY, EVERY, 1e-6, 0.0),
    "a dead channel's activations": (EVERY, CHANNEL, 0.0, 0.0),
    "a dead group's activations": (EVERY, MIDDLE, 0.0, 0.0),
    "no activations": (EVERY, EVERY, 0.0, 0.0),
    "constant activations": (EVERY, CHANNEL, 0.0, 100.0),
    "far out activations": (EVERY, CHANNEL, 1e4, 0.0),
    "equal activations": (EVERY, EVERY, 0.0, 3.0),
    "tiny activations": (EVERY, EVERY, 1e-12, 0.0),
}


@pytest.mark.parametrize("tokens", [1, 200])
@pytest.mark.parametrize("salient", [[], [5, 40], [*range(32, 64)], [*range(70)]])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_input(name: str, salient: list[int], tokens: int) -> None:
    rng = np.random.default_rng(6)
    weight, x = changed(normal(rng, 70, 6), correlated(rng, tokens, 70), name)
    hessian = moment(x)
    found, grid = gptq(weight, Curvature.of(hessian, salient, 32), qmax=QMAX)
    assert_stored(found, grid, salient)
    rounded = fit(weight, salient, 32, QMAX).rounded(weight, salient)
    ours, nearest = (output_errors(weight - w, hessian) for w in (found, rounded))
    noise = 1e-6 * output_errors(np.abs(weight - found), np.abs(hessian)) + 1e-30
    assert (ours <= nearest * (1 + 1e-5) + noise).all()
    if name == "zero weights":
        assert (found == 0).all()


def test_a_weight_beyond_fp16_is_refused() -> None:
    weight = normal(np.random.default_rng(7), 70, 6)
    weight[5, 3] = 1e5
    with pytest.raises(CheckpointError, match=r"a salient channel holds 100000.*'float'"):
        gptq(weight, Curvature.of(np.eye(70), [5], 32), qmax=QMAX)
    weight[5, 3] = 2e6
    with pytest.raises(CheckpointError, match=r"the scale of a group holds 133333, .*'float'"):
        gptq(weight, Curvature.of(np.eye(70), [], 32), qmax=QMAX)


def test_input_is_left_alone() -> None:
    rng = np.random.default_rng(8)
    weight, hessian = normal(rng, 40, 3), moment(correlated(rng, 50, 40))
    copies = weight.copy(), hessian.copy()
    gptq(weight, Curvature.of(hessian, [3], 32), qmax=QMAX)
    np.testing.assert_array_equal(weight, copies[0])
    np.testing.assert_array_equal(hessian, copies[1])


@pytest.mark.parametrize("salient", [[], [7, 50], [*range(32, 64)]])
def test_torch_does_the_same(salient: list[int]) -> None:
    """At least 99 % of the weights to 1e-6 of themselves, and each output's error to 1 %.

    Sums in another order round differently, so a weight between two levels may take the other.
    """
    rng = np.random.default_rng(9)
    weight, hessian = normal(rng, 90, 24), moment(correlated(rng, 400, 90))
    found, grid = gptq(weight, Curvature.of(hessian, salient, 32), qmax=QMAX)
    device = Device.open("torch-cpu")
    theirs, their_grid = gptq(
        device.array(weight), Curvature.of(device.array(hessian), salient, 32), qmax=QMAX
    )
    again = device.numpy(theirs)
    rest = [c for c in range(90) if c not in salient]
    equal = np.isclose(again, found, rtol=1e-6, atol=1e-9)[rest]
    assert equal.mean() >= 0.99
    np.testing.assert_array_equal(device.numpy(their_grid.zeros), grid.zeros)
    errors = [output_errors(weight - w, hessian).sum() for w in (found, again)]
    assert errors[1] == pytest.approx(errors[0], rel=0.01)


def test_a_channel_that_hardly_varies_keeps_its_weights() -> None:
    """Else its weights would go to the ends of the grid for nothing, and ruin another text."""
    rng = np.random.default_rng(5)
    sizes = np.where(np.arange(128) % 4 == 0, 0.01, 1.0)
    x = rng.normal(size=(2000, 128)) * sizes
    weight = normal(rng, 128, 64)
    result, grid = gptq(weight, Curvature.of(moment(x), [], 128), qmax=QMAX)
    quiet = sizes < 1
    change = np.abs(result - weight)[quiet].mean()
    rounding = np.abs(fit(weight, [], 128, QMAX).rounded(weight, []) - weight)[quiet].mean()
    assert change < 2 * rounding
    assert np.isfinite(grid.scales).all()
