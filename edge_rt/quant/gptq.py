"""GPTQ: rounding one input channel after another, each absorbing the errors of those before it.

Frantar et al., GPTQ (2022), in the form of Chee et al., QuIP (2023, theorem 6): with the Hessian
H = (I + U) D (I + U)^T, U strictly upper triangular, channel j is rounded after adding the earlier
channels' errors times U[:, j]. One factorization, no inverse. Then rounds of coordinate descent
lower the same objective, tr(E^T H E), for levels and scales in turn (Behdin et al., QuantEase,
2023, for the levels).

Salient channels come last: they are not rounded to levels, so they take up what is left.
"""

from __future__ import annotations

from array_api_compat import array_namespace, device

from edge_rt.model.device import Array
from edge_rt.quant.curvature import Curvature
from edge_rt.quant.grid import Grid, as_half, fit, fit_group

ROUNDS = 4  # the sweep alone left 7 % more error on held-out text: docs/results/quality-peers.md
SAMPLE = 1024  # outputs on which an error is measured where a sample of them will do


def gptq(
    weight: Array, curvature: Curvature, *, qmax: int, rounds: int = ROUNDS
) -> tuple[Array, Grid]:
    """Quantize `weight` float32 [inputs, outputs] for the least error in its products.

    `curvature` of the second moment of its inputs (or of their covariance, where a bias takes up
    the mean). Returns the quantized weight and its grid. An output whose error is higher than
    round-to-nearest's takes the rounded weights.
    """
    xp = array_namespace(weight)
    hessian, salient, size = curvature.hessian, curvature.salient, curvature.group_size
    plain_grid = fit(weight, salient, size, qmax)
    plain = plain_grid.rounded(weight, salient)
    importance = xp.linalg.diagonal(hessian)
    grid = fit(weight, salient, size, qmax, importance)
    result = _sweep(weight, curvature, grid)
    for _ in range(rounds):
        _descend(weight, result, curvature, grid)
        _absorb(weight, result, curvature)
    worse = errors(weight - result, hessian) > errors(weight - plain, hessian)
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


def _sweep(weight: Array, curvature: Curvature, grid: Grid) -> Array:
    """Round group by group; a group's scale is set from what the errors before have made of it."""
    xp = array_namespace(weight)
    groups, unit = curvature.groups, curvature.unit
    importance = xp.linalg.diagonal(curvature.hessian)
    errors_so_far = xp.zeros(tuple(weight.shape), dtype=weight.dtype, device=device(weight))
    result = xp.zeros(tuple(weight.shape), dtype=weight.dtype, device=device(weight))
    start = 0
    for group, channels in enumerate([*groups, curvature.salient]):
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


def _descend(weight: Array, result: Array, curvature: Curvature, grid: Grid) -> None:
    """One round, in place: for each group its scale, then its channels one by one."""
    xp = array_namespace(weight)
    error = weight - result
    for group, channels in enumerate(curvature.groups):
        rows = curvature.rows(channels)
        inner = rows[:, channels]
        pull = rows @ error
        rescaled = _rescale(result[channels], pull, inner, grid, group)
        pull -= inner @ (rescaled - result[channels])
        result[channels] = rescaled
        curvatures = xp.linalg.diagonal(inner).tolist()
        for offset, (channel, curved) in enumerate(zip(channels, curvatures, strict=True)):
            before = result[channel]
            after = grid.round(before + pull[offset] / curved, group)
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


def _absorb(weight: Array, result: Array, curvature: Curvature) -> None:
    """Set the salient channels, in place, to their best values beside the rounded ones."""
    channels = curvature.salient
    if not channels:
        return
    xp = array_namespace(weight)
    rows = curvature.rows(channels)
    error = weight - result
    error[channels] = 0.0
    inner, owed = (xp.astype(x, xp.float64) for x in (rows[:, channels], rows @ error))
    change = xp.astype(xp.linalg.solve(inner, owed), xp.float32)
    for offset, channel in enumerate(channels):
        result[channel] = as_half(weight[channel] + change[offset], "a salient channel")
