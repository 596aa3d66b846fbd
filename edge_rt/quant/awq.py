"""AWQ: scaling up the input channels that matter before rounding, and down again behind it.

Lin et al., AWQ (2023): channel c of the weight is multiplied by s_c = m_c ** alpha, with m_c its
mean activation magnitude, and the activation is divided by it. One alpha for all linears that read
the activation, from a grid, by the error of their products after rounding to nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from array_api_compat import array_namespace

from edge_rt.model.device import Array
from edge_rt.quant.gptq import errors, sample_outputs
from edge_rt.quant.grid import fit

ALPHAS = tuple(step / 20 for step in range(20))
_LARGEST = 65504.0  # a scaled weight: no FP16 group scale is then in danger, GPTQ's neither


@dataclass(frozen=True, slots=True)
class Scaling:
    """The chosen exponent, and the scales float32 [inputs]; 1 for salient channels."""

    alpha: float
    scales: Array


def scales(magnitude: Array, alpha: float, salient: Sequence[int]) -> Array:
    """`magnitude` [inputs] ** `alpha` as float32; the geometric middle of what is rounded is 1.

    A channel that is hardly ever active is held at a ten-thousandth of the mean.
    """
    xp = array_namespace(magnitude)
    mean = float(xp.mean(magnitude))
    if mean == 0.0:
        return xp.ones_like(xp.astype(magnitude, xp.float32))
    result = xp.clip(magnitude / mean, 1e-4, None) ** alpha
    left_out = set(salient)
    rounded = [channel for channel in range(len(result)) if channel not in left_out]
    if rounded:
        result = result / xp.sqrt(xp.max(result[rounded]) * xp.min(result[rounded]))
    result[list(salient)] = 1.0  # they stay in FP16: scaling them gains nothing
    return xp.astype(result, xp.float32)


def search(
    weights: Sequence[Array],
    hessian: Array,
    magnitude: Array,
    salient: Sequence[int],
    *,
    group_size: int,
    qmax: int,
) -> Scaling:
    """The best of ALPHAS for `weights`, each float32 [inputs, outputs], that read one activation.

    `hessian` float64 [inputs, inputs] as in gptq, `magnitude` float64 [inputs]. Ties go to the
    smaller exponent, so that what does not help is not done; an exponent that would lift a weight
    beyond FP16's range is left out.
    """
    xp = array_namespace(hessian)
    hessian = xp.astype(hessian, xp.float32)
    stacked = xp.concat([sample_outputs(weight) for weight in weights], axis=1)
    reach = xp.max(xp.stack([_reach(weight) for weight in weights]), axis=0)
    best, found = float("inf"), Scaling(0.0, scales(magnitude, 0.0, salient))
    for alpha in ALPHAS:
        factors = scales(magnitude, alpha, salient)[:, None]
        if alpha and float(xp.max(reach * factors[:, 0])) > _LARGEST:
            continue
        scaled = stacked * factors
        rounded = fit(scaled, salient, group_size, qmax).rounded(scaled, salient)
        error = float(xp.sum(errors(stacked - rounded / factors, hessian)))
        if error < best:
            best, found = error, Scaling(alpha, factors[:, 0])
    return found


def _reach(weight: Array) -> Array:
    """The largest magnitude of each channel's weights [inputs]."""
    xp = array_namespace(weight)
    return xp.maximum(xp.max(weight, axis=1), -xp.min(weight, axis=1))
