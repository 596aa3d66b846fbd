"""Weights in MatMulNBits blocks: the INT4 ones to the bit, the head's to half a step."""

from __future__ import annotations

import dataclasses

import numpy as np
from fakes.quantized import quantize_rtn
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.build.blocks import repack, round_to_8_bits
from edge_rt.quant.pack import pack_nibbles, unpack_nibbles


@given(
    n=st.integers(1, 5),
    k=st.integers(1, 300),
    salient=st.integers(0, 20),
    block_size=st.sampled_from([32, 64, 128]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_repacking_keeps_every_weight_to_the_bit(
    n: int, k: int, salient: int, block_size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(n, k)).astype(np.float32)
    chosen = np.sort(rng.choice(k, min(salient, k), replace=False)).astype(np.int32)
    linear = quantize_rtn(weight, chosen, 128)
    # Any zero point and scale, not only those that rounding to nearest gives; the salient slots
    # keep their promise to hold the zero point.
    zeros = rng.integers(0, 16, linear.zeros.shape).astype(np.uint8)
    scales = rng.uniform(1e-4, 10, linear.scales.shape).astype(np.float16)
    q = rng.integers(0, 16, (n, linear.zeros.shape[1] * 128)).astype(np.uint8)
    q[:, chosen] = zeros[:, chosen // 128]
    linear = dataclasses.replace(linear, qweight=pack_nibbles(q), scales=scales, zeros=zeros)
    levels, block_scales, block_zeros = repack(linear, k, block_size)
    blocks = -(-k // block_size)
    assert levels.shape == (n, blocks, block_size // 2)
    q = unpack_nibbles(levels.reshape(n, -1)).reshape(n, blocks, block_size)
    z = unpack_nibbles(block_zeros)[:, :blocks, None]
    again = ((q.astype(np.float32) - z) * block_scales[:, :, None]).reshape(n, -1)[:, :k]
    assert (again[:, chosen] == 0).all()
    again[:, chosen] = linear.dequantize(k)[:, chosen]
    np.testing.assert_array_equal(again, linear.dequantize(k))


@given(
    n=st.integers(1, 5),
    k=st.integers(1, 300),
    block_size=st.sampled_from([32, 64, 128]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_8_bits_are_off_by_half_a_step(n: int, k: int, block_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(n, k)).astype(np.float32)
    weight[:, : k // 2] *= rng.choice([0.0, 1e-6, 1e4])
    levels, scales = round_to_8_bits(weight, block_size)
    blocks = -(-k // block_size)
    assert (levels.shape, scales.shape) == ((n, blocks, block_size), (n, blocks))
    assert (levels.dtype, scales.dtype) == (np.uint8, np.float32)
    again = (levels.astype(np.float64) - 128) * scales[:, :, None]
    padded = np.pad(weight, ((0, 0), (0, blocks * block_size - k))).reshape(again.shape)
    largest = np.abs(padded).max(axis=-1, keepdims=True)
    assert (np.abs(again - padded) <= 0.501 * largest / 127).all()
    assert (again.reshape(n, -1)[:, k:] == 0).all()
