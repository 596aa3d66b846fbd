"""GPTQ: rounding one input channel after another, each absorbing the errors of those before it.

Frantar et al., GPTQ (2022), in the form of Chee et al., QuIP (2023, theorem 6): with the Hessian
H = (I + U) D (I + U)^T, U strictly upper triangular, channel j is rounded after adding the earlier
channels' errors times U[:, j]. One factorization, no inverse. Then rounds of coordinate descent
lower the same objective, tr(E^T H E), for levels and scales in turn (Behdin et al., QuantEase,
2023, for the levels).

Salient channels come last: they are not rounded to levels, so they take up what is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from array_api_compat import array_namespace, device

from edge_rt.model.device import Array
from edge_rt.quant.grid import Grid, as_half, fit, fit_group

# Of the mean diagonal. GPTQ takes 0.01; with the descent, which fits the calibration text more
# closely, 0.1 gave the least error on held-out text in two layers of the demo checkpoint (0.2 the
# same, 0.4 more).
DAMPING = 0.1
ROUNDS = 4  # the sweep alone left 7 % more error on held-out text: docs/results/quality-peers.md
SAMPLE = 1024  # outputs on which an error is measured where a sample of them will do


def gptq(
    weight: Array,
    hessian: Array,
    salient: Sequence[int],
    *,
    group_size: int,
    qmax: int,
    rounds: int = ROUNDS,
) -> tuple[Array, Grid]:
    """Quantize `weight` float32 [inputs, outputs] for the least error in its products.

    `hessian` float64 [inputs, inputs] is the second moment of its inputs (or their covariance,
    where a bias takes up the mean). Returns the quantized weight and its grid. An output whose
    error is higher than round-to-nearest's takes the rounded weights.
    """
    xp = array_namespace(weight)
    hessian32 = xp.astype(hessian, xp.float32)
    stable = damped(hessian, salient)
    stable32 = xp.astype(stable, xp.float32)
    plain_grid = fit(weight, salient, group_size, qmax)
    plain = plain_grid.rounded(weight, salient)
    importance = xp.linalg.diagonal(hessian32)
    grid = fit(weight, salient, group_size, qmax, importance)
    result = _sweep(weight, stable, importance, salient, grid)
    for _ in range(rounds):
        _descend(weight, result, stable32, salient, grid)
        _absorb(weight, result, stable, salient)
    worse = errors(weight - result, hessian32) > errors(weight - plain, hessian32)
    result = xp.where(worse, plain, result)
    grid.scales = xp.where(worse, plain_grid.scales, grid.scales)
    grid.zeros = xp.where(worse, plain_grid.zeros, grid.zeros)
    return result, grid


def errors(difference: Array, hessian: Array) -> Array:
    """The mean square error of each output [outputs] for weights off by `difference`."""
    xp = array_namespace(difference)
    return xp.sum((hessian @ difference) * difference, axis=0)


def sample_outputs(weight: Array) -> Array:
    """At most SAMPLE outputs, evenly spread, of a weight [inputs, outputs]."""
    return weight[:, :: -(-weight.shape[1] // SAMPLE)]


def damped(hessian: Array, salient: Sequence[int]) -> Array:
    """A copy of `hessian` with DAMPING of the other channels' mean added to its diagonal.

    Without it, a channel that hardly varies on the calibration text could take any weight. Salient
    channels do not count: a few of them can be hundreds of times as active as the rest.
    """
    xp = array_namespace(hessian)
    result = xp.asarray(hessian, copy=True)
    every = list(range(len(result)))
    counted = sorted(set(every) - set(np.asarray(salient).tolist())) or every
    mean = float(xp.mean(xp.linalg.diagonal(hessian)[counted]))
    result[every, every] += DAMPING * mean or 1.0
    return result


def unit_upper_factor(hessian: Array, order: Sequence[int]) -> Array:
    """I + U of H = (I + U) D (I + U)^T, U strictly upper, for `hessian`'s channels in `order`."""
    xp = array_namespace(hessian)
    # An upper factor is the lower one of the matrix read backwards.
    upper = xp.flip(xp.linalg.cholesky(xp.flip(hessian[order, :][:, order])))
    unit = upper / xp.linalg.diagonal(upper)
    return xp.astype(unit, xp.float32)


def _sweep(
    weight: Array, hessian: Array, importance: Array, salient: Sequence[int], grid: Grid
) -> Array:
    """Round group by group; a group's scale is set from what the errors before have made of it."""
    xp = array_namespace(weight)
    groups = _groups(weight.shape[0], salient, grid.group_size)
    order = [channel for channels in groups for channel in channels] + list(salient)
    unit = unit_upper_factor(hessian, order)
    errors_so_far = xp.zeros(tuple(weight.shape), dtype=weight.dtype, device=device(weight))
    result = xp.zeros(tuple(weight.shape), dtype=weight.dtype, device=device(weight))
    start = 0
    for group, channels in enumerate([*groups, list(salient)]):
        stop = start + len(channels)
        owed = unit[:start, start:stop].T @ errors_so_far[:start]
        block = weight[channels] + owed
        if group < len(groups) and channels:
            # What the channels would become if none of them were rounded: each also takes up that
            # those before it in the group have moved.
            moved = xp.linalg.solve(unit[start:stop, start:stop].T, owed)
            grid.set(group, *fit_group(weight[channels] + moved, grid.qmax, importance[channels]))
        for offset, channel in enumerate(channels):
            wanted = block[offset]
            if group < len(groups):
                result[channel] = grid.round(wanted, group)
            else:
                result[channel] = as_half(wanted, "a salient channel")
            error = weight[channel] - result[channel]
            errors_so_far[start + offset] = error
            ahead = unit[start + offset, start + offset + 1 : stop]
            block[offset + 1 :] += ahead[:, None] * error
        start = stop
    return result


def _descend(
    weight: Array, result: Array, hessian: Array, salient: Sequence[int], grid: Grid
) -> None:
    """One round, in place: for each group its scale, then its channels one by one."""
    xp = array_namespace(weight)
    error = weight - result
    for group, channels in enumerate(_groups(weight.shape[0], salient, grid.group_size)):
        inner = hessian[channels, :][:, channels]
        pull = hessian[channels, :] @ error
        rescaled = _rescale(result[channels], pull, inner, grid, group)
        pull -= inner @ (rescaled - result[channels])
        result[channels] = rescaled
        curvatures = xp.linalg.diagonal(inner).tolist()
        for offset, (channel, curvature) in enumerate(zip(channels, curvatures, strict=True)):
            before = result[channel]
            after = grid.round(before + pull[offset] / curvature, group)
            pull[offset + 1 :] -= inner[offset + 1 :, offset][:, None] * (after - before)
            result[channel] = after
        error[channels] = weight[channels] - result[channels]


def _rescale(values: Array, pull: Array, inner: Array, grid: Grid, group: int) -> Array:
    """Move the group's scales to their least-squares values; returns `values` so scaled."""
    xp = array_namespace(values)
    scale = grid.scales[group]
    levels = xp.round(values / scale)
    slope = xp.sum(pull * levels, axis=0)
    curvature = xp.sum((inner @ levels) * levels, axis=0)
    wanted = scale + slope / xp.clip(curvature, 1e-30, None)
    # Far from what it was, the step is no small correction but an overflow in the making.
    wanted = as_half(xp.clip(wanted, scale / 2, scale * 2), "the scale of a group")
    step = wanted - scale
    gains = step * (2 * slope - step * curvature) > 0
    step = xp.where(gains & (wanted > 0), step, xp.zeros_like(step))
    grid.scales[group] = scale + step
    return levels * grid.scales[group]


def _absorb(weight: Array, result: Array, hessian: Array, salient: Sequence[int]) -> None:
    """Set the salient channels, in place, to their best values beside the rounded ones."""
    if not len(salient):
        return
    xp = array_namespace(weight)
    channels = list(salient)
    rest = [c for c in range(weight.shape[0]) if c not in set(channels)]
    error = xp.astype(weight[rest] - result[rest], xp.float64)
    inner = hessian[channels, :][:, channels]
    owed = xp.linalg.solve(inner, hessian[channels, :][:, rest] @ error)
    for offset, channel in enumerate(channels):
        value = weight[channel] + xp.astype(owed[offset], xp.float32)
        result[channel] = as_half(value, "a salient channel")


def _groups(inputs: int, salient: Sequence[int], group_size: int) -> list[list[int]]:
    left_out = set(np.asarray(salient).tolist())
    return [
        [c for c in range(start, min(start + group_size, inputs)) if c not in left_out]
        for start in range(0, inputs, group_size)
    ]
