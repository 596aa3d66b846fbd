"""Weights in the blocks of MatMulNBits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edge_rt.errors import ConfigError
from edge_rt.quant.pack import QuantizedLinear, pack_nibbles

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]


def repack(
    linear: QuantizedLinear, in_features: int, block_size: int
) -> tuple[Array, Array, Array]:
    """INT4 groups as MatMulNBits blocks, the same weights to the bit.

    Returns levels uint8 [N, blocks, block_size / 2], scales float32 [N, blocks] and zero points
    uint8 [N, ceil(blocks / 2)], two to a byte.
    """
    if linear.group_size % block_size:
        raise ConfigError(
            f"ort.block_size {block_size} does not divide the checkpoint's group size "
            f"{linear.group_size}; set it to a divisor in the engine recipe"
        )
    n = linear.scales.shape[0]
    blocks = -(-in_features // block_size)
    levels = linear.qweight.reshape(n, -1, block_size // 2)[:, :blocks]
    per_group = linear.group_size // block_size
    scales = np.repeat(linear.scales.astype(np.float32), per_group, axis=1)[:, :blocks]
    zeros = np.repeat(linear.zeros, per_group, axis=1)[:, :blocks]
    zeros = np.pad(zeros, ((0, 0), (0, blocks % 2)))
    return levels, scales, pack_nibbles(zeros)


def round_to_8_bits(weight: F32, block_size: int) -> tuple[Array, Array]:
    """A float32 weight [N, K] in blocks of 8 bits around a zero point of 128.

    Returns levels uint8 [N, blocks, block_size] and scales float32 [N, blocks]; what pads the last
    block is zero.
    """
    n, k = weight.shape
    blocks = np.pad(weight, ((0, 0), (0, -k % block_size))).reshape(n, -1, block_size)
    scales = np.abs(blocks).max(axis=-1) / 127
    # A block of zeros has any scale.
    levels = np.rint(blocks / np.where(scales > 0, scales, 1)[..., None]) + 128
    return levels.astype(np.uint8), scales
