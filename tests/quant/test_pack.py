from __future__ import annotations

import numpy as np
import pytest
from fakes.quantized import quantize_rtn
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_rt.errors import CheckpointError
from edge_rt.quant.grid import Grid
from edge_rt.quant.pack import (
    QuantizedLinear,
    pack,
    pack_nibbles,
    scale_outputs,
    unpack_nibbles,
)

NONE = np.zeros(0, np.int32)
GROUP = 32
weights = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 100)),
    elements=st.floats(-100, 100, width=32),
)


@given(
    hnp.arrays(
        np.uint8,
        st.tuples(st.integers(1, 5), st.integers(1, 20).map(lambda k: 2 * k)),
        elements=st.integers(0, 15),
    )
)
def test_nibbles_round_trip(q: np.ndarray) -> None:
    packed = pack_nibbles(q)
    assert packed.shape == (q.shape[0], q.shape[1] // 2)
    np.testing.assert_array_equal(unpack_nibbles(packed), q)


def test_the_even_column_is_the_low_nibble() -> None:
    assert pack_nibbles(np.array([[0x3, 0xA]], np.uint8)).tolist() == [[0xA3]]


@given(weights)
def test_every_weight_is_within_half_a_step(w: np.ndarray) -> None:
    linear = quantize_rtn(w, NONE, GROUP)
    step = np.repeat(linear.scales.astype(np.float64), GROUP, axis=1)[:, : w.shape[1]]
    error = np.abs(linear.dequantize(w.shape[1]).astype(np.float64) - w)
    # The scale itself is rounded to FP16: over 15 steps that can cost the ends a little more.
    assert (error <= 0.5 * step * (1 + 15 * 2**-10) + 15 * 2.0**-24).all()


@given(weights)
def test_zero_is_a_level_and_padding_adds_nothing(w: np.ndarray) -> None:
    w = np.where(np.abs(w) < 50, np.float32(0), w)
    linear = quantize_rtn(w, NONE, GROUP)
    padded = linear.dequantize(linear.scales.shape[1] * GROUP)
    assert (padded[:, : w.shape[1]][w == 0] == 0).all()
    assert (padded[:, w.shape[1] :] == 0).all()


def test_against_a_plain_float64_formulation() -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(6, 70)).astype(np.float32)
    linear = quantize_rtn(w, NONE, GROUP)
    for row in range(6):
        for group in range(3):
            part = w[row, group * GROUP : (group + 1) * GROUP].astype(np.float64)
            low, high = min(part.min(), 0), max(part.max(), 0)
            scale = float(np.float16((high - low) / 15))
            zero = round(-low / scale)
            assert linear.scales[row, group] == np.float16(scale)
            assert linear.zeros[row, group] == zero
            q = np.clip(np.rint(part / scale) + zero, 0, 15)
            found = linear.dequantize(70)[row, group * GROUP : (group + 1) * GROUP]
            np.testing.assert_allclose(found, (q - zero) * scale, atol=1e-6)


@pytest.mark.parametrize(
    "group",
    [
        np.zeros(GROUP),
        np.full(GROUP, 0.37),
        np.full(GROUP, -0.37),
        np.full(GROUP, 1e-9),
        np.r_[1000.0, np.full(GROUP - 1, 0.01)],
        np.linspace(1, 2, GROUP),
    ],
    ids=["zero", "positive constant", "negative constant", "tiny", "outlier", "all positive"],
)
def test_degenerate_groups_stay_finite_and_close(group: np.ndarray) -> None:
    w = group[None].astype(np.float32)
    linear = quantize_rtn(w, NONE, GROUP)
    found = linear.dequantize(GROUP)
    assert np.isfinite(found).all()
    assert (linear.scales > 0).all()
    assert np.abs(found - w).max() <= 0.51 * float(linear.scales[0, 0]) + 1e-7


@pytest.mark.parametrize(("value", "salient"), [(2e6, []), (1e5, [3])])
def test_what_fp16_cannot_hold_is_refused(value: float, salient: list[int]) -> None:
    w = np.zeros((1, GROUP), np.float32)
    w[0, 3] = value
    with pytest.raises(CheckpointError, match=r"more than FP16's 65504.*recipe 'float'"):
        quantize_rtn(w, np.array(salient, np.int32), GROUP)


def test_salient_columns_are_exact_and_their_slots_add_nothing() -> None:
    rng = np.random.default_rng(1)
    w = rng.normal(size=(5, 64)).astype(np.float32)
    salient = np.array([0, 31, 40], np.int32)
    w[:, salient] *= 100  # would ruin the groups if it counted
    linear = quantize_rtn(w, salient, GROUP)
    assert linear.w_salient.shape == (5, 16)
    assert linear.idx.tolist() == [0, 31, 40, *[-1] * 13]
    assert (linear.w_salient[:, 3:] == 0).all()
    found = linear.dequantize(64)
    np.testing.assert_array_equal(found[:, salient], w[:, salient].astype(np.float16))
    slots = unpack_nibbles(linear.qweight)[:, salient]
    np.testing.assert_array_equal(slots, linear.zeros[:, salient // GROUP])
    without = w.copy()
    without[:, salient] = 0
    np.testing.assert_array_equal(
        quantize_rtn(without, NONE, GROUP).scales, linear.scales, "the outliers set the scale"
    )


def test_tensors_round_trip() -> None:
    linear = quantize_rtn(np.ones((2, 8), np.float32), np.array([1], np.int32), GROUP)
    again = QuantizedLinear.from_tensors(linear.tensors())
    assert again.group_size == GROUP
    np.testing.assert_array_equal(again.dequantize(8), linear.dequantize(8))


@pytest.mark.parametrize("sigma", [1e-5, 1e-4, 1.0])
def test_small_weights_are_not_rounded_away(sigma: float) -> None:
    w = np.random.default_rng(2).normal(0, sigma, (8, 128)).astype(np.float32)
    error = quantize_rtn(w, NONE, GROUP).dequantize(128) - w
    assert np.linalg.norm(error) / np.linalg.norm(w) < 0.12


def a_grid(rng: np.random.Generator) -> tuple[Grid, np.ndarray, np.ndarray]:
    """Of 70 inputs and 5 outputs, with levels uint8 [5, 70] and the weights [5, 70] they mean."""
    scales = rng.uniform(0.001, 2, (3, 5)).astype(np.float16).astype(np.float32)
    zeros = rng.integers(0, 16, (3, 5)).astype(np.float32)
    levels = rng.integers(0, 16, (5, 70)).astype(np.uint8)
    owner = np.arange(70) // GROUP
    weight = (levels - zeros.T[:, owner]) * scales.T[:, owner]
    return Grid(scales, zeros, GROUP, 15), levels, weight.astype(np.float32)


def test_every_level_is_packed_as_it_is() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        grid, levels, weight = a_grid(rng)
        salient = np.array([2, 64], np.int32)
        weight[:, salient] = rng.normal(size=(5, 2)).astype(np.float16)
        bias = rng.normal(size=5).astype(np.float32)
        linear = pack(weight, grid, salient, bias)
        rest = np.delete(np.arange(70), salient)
        stored = unpack_nibbles(linear.qweight)
        np.testing.assert_array_equal(stored[:, rest], levels[:, rest])
        for column in (*salient, *range(70, 96)):
            np.testing.assert_array_equal(stored[:, column], grid.zeros[column // GROUP])
        np.testing.assert_array_equal(linear.dequantize(70), weight)
        np.testing.assert_array_equal(linear.scales, grid.scales.T)
        np.testing.assert_array_equal(linear.bias, bias)
        assert (linear.post_scale == 1).all()


def test_without_a_bias_it_is_zero() -> None:
    assert quantize_rtn(np.ones((3, 8), np.float32), NONE, GROUP).bias.tolist() == [0.0] * 3


def test_scaled_outputs() -> None:
    """The weights and bias are multiplied, to what FP16 holds; the levels are those before."""
    rng = np.random.default_rng(4)
    weight, bias = rng.normal(size=(5, 70)).astype(np.float32), rng.normal(size=5)
    linear = quantize_rtn(weight, np.array([7], np.int32), GROUP, bias.astype(np.float32))
    factors = np.array([1.0, 0.37, 25.0, 1e-3, 3.0], np.float32)
    scaled = scale_outputs(linear, factors)
    np.testing.assert_array_equal(scaled.qweight, linear.qweight)
    np.testing.assert_array_equal(scaled.zeros, linear.zeros)
    np.testing.assert_array_equal(scaled.post_scale, linear.post_scale)
    expected = linear.dequantize(70).astype(np.float64) * factors[:, None]
    # 2**-24 apart at the lower end, and a weight is up to 15 scales.
    np.testing.assert_allclose(scaled.dequantize(70), expected, rtol=2**-11, atol=15 * 2.0**-25)
    np.testing.assert_allclose(scaled.bias, bias * factors, rtol=1e-6)
    assert scale_outputs(linear, np.ones(5, np.float32)) is linear


def test_outputs_scaled_to_nothing_keep_a_scale() -> None:
    linear = quantize_rtn(np.ones((2, 8), np.float32), NONE, GROUP)
    scaled = scale_outputs(linear, np.array([1e-9, 1.0], np.float32))
    assert (scaled.scales > 0).all()
    assert np.abs(scaled.dequantize(8)[0]).max() < 1e-6


def test_outputs_scaled_beyond_fp16_are_refused() -> None:
    linear = quantize_rtn(np.ones((2, 8), np.float32), np.array([1], np.int32), GROUP)
    with pytest.raises(CheckpointError, match="the scale of a group holds"):
        scale_outputs(linear, np.array([1e7, 1.0], np.float32))
    with pytest.raises(CheckpointError, match="a salient channel holds"):
        scale_outputs(linear, np.array([1e5, 1.0], np.float32))
