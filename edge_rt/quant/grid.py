"""The levels that a weight matrix may take: a scale and an integer zero point for each group.

Everything that quantizes works on the transposed weight [inputs, outputs], so that an input channel
is contiguous, and on arrays of any Device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace, device

from edge_rt.errors import CheckpointError
from edge_rt.model.device import Array

# The smallest FP16: a group of zeros would otherwise get a scale of zero.
SCALE_FLOOR = float(np.finfo(np.float16).smallest_subnormal)
# What a group's range may shrink to, as fractions of it.
CLIPS = tuple(1.0 - 0.03 * step for step in range(16))


@dataclass(slots=True)
class Grid:
    """Group g of output n holds (q - zeros[g, n]) * scales[g, n] with q in 0..qmax.

    `scales` and `zeros` are float32 [groups, outputs]; scales are FP16 values, zeros whole numbers.
    """

    scales: Array
    zeros: Array
    group_size: int
    qmax: int

    def round(self, values: Array, group: int) -> Array:
        """The nearest values of the grid for `values` [channels, outputs] of one group."""
        return _on_grid(values, self.scales[group], self.zeros[group], self.qmax)

    def set(self, group: int, scale: Array, zero: Array) -> None:
        """Replace one group's scale and zero point, each [outputs]."""
        self.scales[group], self.zeros[group] = scale, zero

    def rounded(self, weight: Array, salient: Sequence[int]) -> Array:
        """`weight` [inputs, outputs] rounded to nearest, salient channels to FP16."""
        xp = array_namespace(weight)
        result = xp.empty(tuple(weight.shape), dtype=weight.dtype, device=device(weight))
        for group, start in enumerate(range(0, weight.shape[0], self.group_size)):
            stop = start + self.group_size
            result[start:stop] = self.round(weight[start:stop], group)
        for channel in salient:
            result[channel] = as_half(weight[channel], "a salient channel")
        return result


def as_half(x: Array, what: str) -> Array:
    """`x` rounded to FP16, as float32; CheckpointError where a value is beyond FP16's range."""
    xp = array_namespace(x)
    with np.errstate(over="ignore"):
        half = xp.astype(xp.astype(x, xp.float16), xp.float32)
    if not bool(xp.all(xp.isfinite(x))):
        raise CheckpointError(f"{what} is not finite; the checkpoint's weights are damaged")
    if not bool(xp.all(xp.isfinite(half))):
        raise CheckpointError(
            f"{what} holds {float(xp.max(xp.abs(x))):.6g}, more than FP16's 65504, so INT4 with "
            f"FP16 parts cannot store it; use the recipe 'float', which keeps such weights in "
            f"float32"
        )
    return half


def fit_group(weight: Array, qmax: int, importance: Array | None = None) -> tuple[Array, Array]:
    """Scale and zero point, each [outputs], for one group's `weight` [channels, outputs].

    The range always includes zero, so that the zero point is a level of its own and is never
    clamped. With `importance` [channels] (the mean square of each channel's activation) the range
    is shrunk where that lowers the error so weighted, as AWQ and GPTQ's implementations do.
    """
    xp = array_namespace(weight)
    low = xp.clip(xp.min(weight, axis=0), None, 0.0)
    high = xp.clip(xp.max(weight, axis=0), 0.0, None)
    best_scale, best_zero = _scale(low, high, qmax)
    if importance is None:
        return best_scale, best_zero
    best = _error(weight, best_scale, best_zero, qmax, importance)
    for clip in CLIPS[1:]:
        scale, zero = _scale(low * clip, high * clip, qmax)
        error = _error(weight, scale, zero, qmax, importance)
        better = error < best
        best = xp.where(better, error, best)
        best_scale = xp.where(better, scale, best_scale)
        best_zero = xp.where(better, zero, best_zero)
    return best_scale, best_zero


def fit(
    weight: Array,
    salient: Sequence[int],
    group_size: int,
    qmax: int,
    importance: Array | None = None,
) -> Grid:
    """A grid for `weight` [inputs, outputs]; salient channels and padding do not count."""
    xp = array_namespace(weight)
    rest = xp.asarray(weight, copy=True)
    for channel in salient:
        rest[channel] = 0.0
    fits = [
        fit_group(
            rest[start : start + group_size],
            qmax,
            None if importance is None else importance[start : start + group_size],
        )
        for start in range(0, weight.shape[0], group_size)
    ]
    scales, zeros = (xp.stack(parts) for parts in zip(*fits, strict=True))
    return Grid(scales, zeros, group_size, qmax)


def _scale(low: Array, high: Array, qmax: int) -> tuple[Array, Array]:
    xp = array_namespace(low)
    scale = as_half(xp.clip((high - low) / qmax, SCALE_FLOOR, None), "the scale of a group")
    return scale, xp.clip(xp.round(-low / scale), 0, qmax)


def _on_grid(values: Array, scale: Array, zero: Array, qmax: int) -> Array:
    # Methods that NumPy and torch share: called for every channel, where looking up the array
    # namespace costs more than the arithmetic.
    return (((values / scale).round() + zero).clip(0, qmax) - zero) * scale


def _error(weight: Array, scale: Array, zero: Array, qmax: int, importance: Array) -> Array:
    difference = weight - _on_grid(weight, scale, zero, qmax)
    return importance @ (difference * difference)
