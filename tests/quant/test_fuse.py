"""Several linears as one: the same outputs, whatever their salient channels."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from fakes.quantized import quantize_rtn
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.quant.fuse import can_join, can_stack, join, stack
from edge_rt.quant.pack import SALIENT_MULTIPLE, QuantizedLinear

GROUP = 32


def linear(rng: np.random.Generator, n: int, k: int, salient: list[int]) -> QuantizedLinear:
    weight = rng.normal(size=(n, k)).astype(np.float32)
    made = quantize_rtn(weight, np.array(sorted(salient), np.int32), GROUP)
    return dataclasses.replace(made, bias=rng.normal(size=n).astype(np.float32))


def outputs(one: QuantizedLinear, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weight = one.dequantize(x.shape[1]).astype(np.float64)
    return (x @ weight.T + one.bias) * one.post_scale


@given(
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    k=st.integers(1, 100),
    salient=st.integers(0, 20),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_stacked_outputs_stand_one_after_the_other(
    rows: list[int], k: int, salient: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    chosen = rng.choice(k, min(salient, k), replace=False).tolist()
    parts = [linear(rng, n, k, chosen) for n in rows]
    parts[-1] = dataclasses.replace(parts[-1], post_scale=rng.uniform(1, 2, rows[-1]))
    assert can_stack(parts)
    x = rng.normal(size=(3, k))
    expected = np.concatenate([outputs(part, x) for part in parts], axis=1)
    np.testing.assert_allclose(outputs(stack(parts), x), expected, rtol=1e-12)


@given(
    groups=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    salient=st.lists(st.integers(0, 20), min_size=3, max_size=3),
    n=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_joined_outputs_are_the_sums(
    groups: list[int], salient: list[int], n: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    features = [GROUP * count for count in groups]
    chosen = [
        rng.choice(k, c, replace=False).tolist() for k, c in zip(features, salient, strict=False)
    ]
    parts = [linear(rng, n, k, c) for k, c in zip(features, chosen, strict=True)]
    assert can_join(parts, features)
    xs = [rng.normal(size=(3, k)) for k in features]
    expected = sum(outputs(part, x) for part, x in zip(parts, xs, strict=True))
    joined = join(parts, features)
    found = outputs(joined, np.concatenate(xs, axis=1))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert len(joined.idx) % SALIENT_MULTIPLE == 0
    assert len(joined.salient) == sum(map(len, chosen))
    assert (joined.w_salient[:, len(joined.salient) :] == 0).all()


@pytest.mark.parametrize("salient", [[4], [3, 5], []])
def test_other_salient_channels_are_not_stacked(salient: list[int]) -> None:
    rng = np.random.default_rng(0)
    assert not can_stack([linear(rng, 2, 64, [3]), linear(rng, 2, 64, salient)])


def test_other_groups_are_neither_stacked_nor_joined() -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(2, 64)).astype(np.float32)
    none = np.zeros(0, np.int32)
    parts = [quantize_rtn(weight, none, 32), quantize_rtn(weight, none, 64)]
    assert not can_stack(parts)
    assert not can_join(parts, [64, 64])


def test_a_group_that_would_reach_across_is_not_joined() -> None:
    rng = np.random.default_rng(0)
    parts = [linear(rng, 2, 48, []), linear(rng, 2, 64, [])]
    assert not can_join(parts, [48, 64])


def test_a_scaled_output_is_not_joined() -> None:
    rng = np.random.default_rng(0)
    parts = [linear(rng, 2, 64, []), linear(rng, 2, 64, [])]
    parts[1] = dataclasses.replace(parts[1], post_scale=np.array([1, 2], np.float32))
    assert not can_join(parts, [64, 64])
