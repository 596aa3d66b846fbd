"""What errors in the weights of linears that read one activation cost, factored for GPTQ.

In place wherever it can be: at GPT-J-6B's width one of these matrices takes 2 GB in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from array_api_compat import array_namespace, device

from edge_rt.model.device import Array

# Of the mean diagonal. GPTQ takes 0.01; with the descent, which fits the calibration text more
# closely, 0.1 gave the least error on held-out text in two layers of the demo checkpoint (0.2 the
# same, 0.4 more).
DAMPING = 0.1
BLOCK = 512  # channels of one step of the factorization and of what is solved with it


@dataclass(frozen=True, slots=True)
class Curvature:
    """A Hessian, and its factors in the order in which GPTQ rounds: group by group, salient last.

    `hessian` float32 [inputs, inputs]. With `damping` on its diagonal and its channels in `order`
    it is (I + U) D (I + U)^T: `unit` is I + U, U strictly upper, `pivots` D [inputs], float32.
    """

    hessian: Array
    damping: float
    group_size: int
    groups: list[list[int]]
    salient: list[int]
    unit: Array
    pivots: Array

    @classmethod
    def of(
        cls,
        hessian: Array,
        salient: Sequence[int] = (),
        group_size: int = BLOCK,
        scales: Array | None = None,
    ) -> Curvature:
        """Of a second moment float64 [inputs, inputs], or of one of inputs divided by `scales`.

        Where it is only to be solved for, there are no salient channels and any group size will do.

        The damping is DAMPING of the mean diagonal: without it, a channel that hardly varies on
        the calibration text could take any weight. Salient channels do not count in the mean: a
        few of them can be hundreds of times as active as the rest.
        """
        xp = array_namespace(hessian)
        groups = split(hessian.shape[0], salient, group_size)
        rounded = [channel for channels in groups for channel in channels]
        order = xp.asarray([*rounded, *salient], dtype=xp.int64, device=device(hessian))
        factored = hessian[order[:, None], order]
        if scales is not None:
            _divide(factored, scales[order])
        diagonal = xp.linalg.diagonal(factored)
        damping = DAMPING * float(xp.mean(diagonal[: len(rounded) or len(order)])) or 1.0
        every = xp.arange(len(order), device=device(hessian))
        factored[every, every] += damping
        upper_factor(factored)
        roots = xp.asarray(xp.linalg.diagonal(factored), copy=True)
        factored /= roots
        unit, pivots = (xp.astype(x, xp.float32) for x in (factored, roots * roots))
        del factored
        return cls(
            scaled(hessian, scales), damping, group_size, groups, list(salient), unit, pivots
        )

    @property
    def order(self) -> list[int]:
        """Every channel, as it is rounded."""
        return [channel for channels in (*self.groups, self.salient) for channel in channels]

    def rows(self, channels: list[int]) -> Array:
        """Rows of the damped Hessian, float32 [channels, inputs]."""
        result = self.hessian[channels]
        result[list(range(len(channels))), channels] += self.damping
        return result

    def solve(self, wanted: Array) -> Array:
        """What the damped Hessian turns into `wanted`, float32 [inputs, outputs]."""
        xp = array_namespace(wanted)
        x = wanted[self.order]
        starts = range(0, len(self.unit), BLOCK)
        for start in reversed(starts):
            here, after = slice(start, start + BLOCK), slice(start + BLOCK, None)
            x[here] = xp.linalg.solve(
                self.unit[here, here], x[here] - self.unit[here, after] @ x[after]
            )
        x /= self.pivots[:, None]
        for start in starts:
            here, before = slice(start, start + BLOCK), slice(start)
            x[here] = xp.linalg.solve(
                self.unit[here, here].T, x[here] - self.unit[before, here].T @ x[before]
            )
        result = xp.empty_like(x)
        result[self.order] = x
        return result


def scaled(hessian: Array, scales: Array | None) -> Array:
    """`hessian` [inputs, inputs] as float32, of inputs divided by `scales` [inputs] if given."""
    xp = array_namespace(hessian)
    result = xp.astype(hessian, xp.float32)
    if scales is not None:
        _divide(result, scales)
    return result


def split(inputs: int, salient: Sequence[int], group_size: int) -> list[list[int]]:
    """The channels of each group, without salient ones."""
    left_out = set(salient)
    return [
        [c for c in range(start, min(start + group_size, inputs)) if c not in left_out]
        for start in range(0, inputs, group_size)
    ]


def upper_factor(matrix: Array) -> None:
    """Replace a positive definite `matrix` by R, upper triangular, of matrix = R R^T.

    Cholesky's factorization in blocks, left-looking, from the last block to the first: what
    linalg.cholesky does, without its copies.
    """
    xp = array_namespace(matrix)
    for start in reversed(range(0, len(matrix), BLOCK)):
        here, before, after = slice(start, start + BLOCK), slice(start), slice(start + BLOCK, None)
        panel = matrix[: start + BLOCK, here] - (
            matrix[: start + BLOCK, after] @ matrix[here, after].T
        )
        # An upper factor is the lower one of the matrix read backwards.
        factor = xp.flip(xp.linalg.cholesky(xp.flip(panel[start:])))
        matrix[here, here] = factor
        matrix[after, here] = 0.0
        if start:
            matrix[before, here] = xp.linalg.solve(factor, panel[before].T).T


def _divide(matrix: Array, scales: Array) -> None:
    matrix /= scales[:, None]
    matrix /= scales
