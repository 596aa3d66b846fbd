"""Against a float64 formulation in loops, and on input that has nothing to fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_rt.errors import CheckpointError
from edge_rt.quant.grid import Grid, as_half, fit, fit_group

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
GROUP = 8
LIMIT = 65504 * 15  # what a group's range may be

channels = st.integers(1, 30)
plain_floats = st.floats(-100, 100, width=32)


def weights(data: st.DataObject, inputs: int) -> F32:
    shape = (inputs, data.draw(st.integers(1, 3)))
    return data.draw(hnp.arrays(np.float32, shape, elements=plain_floats))


def one_output(weight: F64, importance: F64 | None, qmax: int) -> tuple[float, float, float]:
    """Scale, zero point and weighted error of one group of one output."""
    low, high = min(weight.min(), 0.0), max(weight.max(), 0.0)
    clips = [1.0] if importance is None else [1.0 - 0.03 * step for step in range(16)]
    importance = np.ones(len(weight)) if importance is None else importance
    found = (0.0, 0.0, np.inf)
    for clip in clips:
        scale = float(np.float16(max((high - low) * clip / qmax, 2.0**-24)))
        zero = min(max(round(-low * clip / scale), 0), qmax)
        error = 0.0
        for value, factor in zip(weight, importance, strict=True):
            level = min(max(round(value / scale) + zero, 0), qmax)
            error += factor * (value - (level - zero) * scale) ** 2
        if error < found[2]:
            found = (scale, zero, error)
    return found


def weighted_error(weight: F32, grid: Grid, importance: F64) -> F64:
    difference = grid.rounded(weight, []).astype(np.float64) - weight
    return importance @ difference**2


def assert_sound(grid: Grid, qmax: int = 15) -> None:
    assert np.isfinite(grid.scales).all()
    assert (grid.scales > 0).all()
    np.testing.assert_array_equal(grid.scales, grid.scales.astype(np.float16))
    np.testing.assert_array_equal(grid.zeros, np.rint(grid.zeros))
    assert (grid.zeros >= 0).all()
    assert (grid.zeros <= qmax).all()


@pytest.mark.parametrize("qmax", [15, 7])
@pytest.mark.parametrize("weighted", [True, False])
def test_fit_is_the_plain_formulation(weighted: bool, qmax: int) -> None:
    """Two clips may be equally good, so the error is compared, and the choice nearly always."""
    rng = np.random.default_rng(qmax)
    same = total = 0
    for _ in range(20):
        inputs = int(rng.integers(1, 3 * GROUP))
        weight = rng.standard_t(3, (inputs, 4)).astype(np.float32)
        importance = rng.gamma(0.5, size=inputs).astype(np.float32) if weighted else None
        grid = fit(weight, [], GROUP, qmax, importance)
        assert_sound(grid, qmax)
        rounded = grid.rounded(weight, [])
        for group, start in enumerate(range(0, inputs, GROUP)):
            rows = slice(start, start + GROUP)
            factors = None if importance is None else importance[rows].astype(np.float64)
            for n in range(4):
                exact = weight[rows, n].astype(np.float64)
                scale, zero, error = one_output(exact, factors, qmax)
                difference = (rounded[rows, n] - exact) ** 2
                found = np.sum(difference if factors is None else factors * difference)
                assert found == pytest.approx(error, rel=1e-4, abs=1e-12)
                same += grid.scales[group, n] == scale and grid.zeros[group, n] == zero
                total += 1
    assert same >= 0.99 * total


@given(st.data(), channels)
def test_a_level_is_its_own_nearest(data: st.DataObject, inputs: int) -> None:
    weight = weights(data, inputs)
    grid = fit(weight, [], GROUP, 15)
    rounded = grid.rounded(weight, [])
    np.testing.assert_array_equal(grid.rounded(rounded, []), rounded)


@given(st.data(), channels)
def test_round_takes_the_nearest_level(data: st.DataObject, inputs: int) -> None:
    weight = weights(data, inputs)
    grid = fit(weight, [], inputs, 15, np.ones(inputs, np.float32))
    levels = (np.arange(16)[:, None] - grid.zeros[0]) * grid.scales[0].astype(np.float64)
    nearest = np.abs(levels[:, None, :] - weight).min(axis=0)
    found = np.abs(grid.rounded(weight, []).astype(np.float64) - weight)
    assert (found <= nearest + 1e-5 * grid.scales[0]).all()


@given(st.data(), channels)
def test_importance_never_makes_its_own_error_larger(data: st.DataObject, inputs: int) -> None:
    weight = weights(data, inputs)
    importance = data.draw(
        hnp.arrays(np.float32, inputs, elements=st.floats(0, 1000, width=32))
    ).astype(np.float32)
    plain, weighted = fit(weight, [], GROUP, 15), fit(weight, [], GROUP, 15, importance)
    assert_sound(weighted)
    exact = importance.astype(np.float64)
    allowed = weighted_error(weight, plain, exact)
    # Each of the float32 sums that were compared is off by some 1e-6 of itself.
    assert (weighted_error(weight, weighted, exact) <= allowed * (1 + 1e-5) + 1e-30).all()


def test_importance_pays_where_one_weight_is_far_out() -> None:
    """Of a group whose largest weight hardly counts, the range shrinks to what does."""
    weight = np.random.default_rng(0).normal(size=(64, 1)).astype(np.float32)
    weight[5] = 5.0
    importance = np.ones(64, np.float32)
    importance[5] = 1e-4
    plain, weighted = fit(weight, [], 64, 15), fit(weight, [], 64, 15, importance)
    assert weighted.scales[0, 0] < 0.85 * plain.scales[0, 0]
    exact = importance.astype(np.float64)
    assert weighted_error(weight, weighted, exact) < 0.8 * weighted_error(weight, plain, exact)


@pytest.mark.parametrize("importance", [None, np.ones(GROUP, np.float32)])
@pytest.mark.parametrize(
    "group",
    [
        np.zeros(GROUP),
        np.full(GROUP, 0.37),
        np.full(GROUP, -0.37),
        np.full(GROUP, 1e-9),
        np.full(GROUP, -1e-30),
        np.r_[1e4, np.ones(GROUP - 1)],
        np.r_[-LIMIT, np.zeros(GROUP - 1)],
        np.r_[LIMIT / 2, np.zeros(GROUP - 2), -LIMIT / 2],
    ],
    ids=["zero", "constant", "negative", "tiny", "denormal", "outlier", "lowest", "widest"],
)
def test_degenerate_groups(group: F64, importance: F32 | None) -> None:
    weight = group.astype(np.float32)[:, None]
    grid = fit(weight, [], GROUP, 15, importance)
    assert_sound(grid)
    rounded = grid.rounded(weight, [])
    assert np.isfinite(rounded).all()
    assert (rounded[group == 0] == 0).all()
    # A shrunk range only helps in sum: with the outlier it takes what the others gain.
    clipped = 1.0 if importance is None else GROUP**0.5
    assert np.abs(rounded - weight).max() <= clipped * 0.51 * grid.scales.max() + 1e-7


def test_a_channel_that_does_not_count_does_not_set_the_range() -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(20, 3)).astype(np.float32)
    without = weight.copy()
    weight[[2, 19]] *= 1000
    without[[2, 19]] = 0.0
    grid, expected = fit(weight, [2, 19], GROUP, 15), fit(without, [], GROUP, 15)
    np.testing.assert_array_equal(grid.scales, expected.scales)
    np.testing.assert_array_equal(grid.zeros, expected.zeros)
    rounded = grid.rounded(weight, [2, 19])
    np.testing.assert_array_equal(rounded[[2, 19]], weight[[2, 19]].astype(np.float16))


def test_fit_leaves_its_input_alone() -> None:
    weight = np.random.default_rng(1).normal(size=(20, 3)).astype(np.float32)
    before = weight.copy()
    fit(weight, [3], GROUP, 15, np.ones(20, np.float32)).rounded(weight, [3])
    np.testing.assert_array_equal(weight, before)


def test_set_replaces_one_group() -> None:
    grid = fit(np.ones((3 * GROUP, 2), np.float32), [], GROUP, 15)
    others = grid.scales[[0, 2]].copy()
    grid.set(1, np.array([0.5, 2.0], np.float32), np.array([8.0, 0.0], np.float32))
    values = np.array([[-100.0, -1.0], [0.3, 3.2], [100.0, 100.0]], np.float32)
    assert grid.round(values, 1).tolist() == [[-4.0, 0.0], [0.5, 4.0], [3.5, 30.0]]
    np.testing.assert_array_equal(grid.scales[[0, 2]], others)


@pytest.mark.parametrize("importance", [None, np.ones(2, np.float32)])
def test_a_range_beyond_fp16_is_refused_by_name(importance: Any) -> None:
    weight = np.array([[1.0], [2e6]], np.float32)
    with pytest.raises(CheckpointError, match=r"the scale of a group holds 133333, .*'float'"):
        fit_group(weight, 15, importance)


@pytest.mark.parametrize("value", [1e5, -1e5])
def test_half_names_what_it_cannot_hold(value: float) -> None:
    assert as_half(np.array([65504.0, -1e-9]), "x").tolist() == [65504.0, 0.0]
    with pytest.raises(CheckpointError, match=r"a salient channel holds .* more than FP16's 65504"):
        as_half(np.array([1.0, value]), "a salient channel")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_half_names_what_is_no_number(value: float) -> None:
    with pytest.raises(CheckpointError, match="a salient channel is not finite"):
        as_half(np.array([1.0, value]), "a salient channel")
