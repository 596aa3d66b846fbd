"""What the calibration text does to a model: moments of the activations that linears read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace

from edge_rt.errors import CheckpointError, ConfigError
from edge_rt.model.device import Array

# Activations that are not finite are for Moments.check to find.
_UNCHECKED = np.errstate(invalid="ignore", over="ignore")


def sample_sequences(
    tokens: npt.NDArray[np.int64], sequences: int, length: int, seed: int | None = None
) -> npt.NDArray[np.int64]:
    """Cut `sequences` windows of `length` tokens from the text, without overlap.

    Evenly spread, or with a seed drawn at random; in the text's order. ConfigError when the text
    holds fewer tokens than one window; fewer windows when it holds fewer than asked for.
    """
    available = len(tokens) // length
    if available == 0:
        raise ConfigError(
            f"the calibration text has {len(tokens)} tokens, less than one sequence of {length}; "
            f"give a longer text"
        )
    windows = tokens[: available * length].reshape(available, length)
    count = min(sequences, available)
    if seed is None:
        return windows[np.linspace(0, available - 1, count).astype(np.int64)]
    drawn = np.random.default_rng(seed).choice(available, count, replace=False)
    return windows[np.sort(drawn)]


@dataclass(slots=True)
class Moments:
    """Sums over tokens of what linears read in the quantized model (q) and in the float one (f).

    `q`, `f` and `magnitude` |q|, float64 [inputs]; `r` [n_embd] is what the quantized model's
    residual stream lacks. With the means taken off all three: `second` q q^T and `cross` q f^T,
    both float64 [inputs, inputs], and `owed` q r^T [inputs, n_embd].
    """

    count: int
    second: Array
    cross: Array
    owed: Array
    q: Array
    f: Array
    r: Array
    magnitude: Array

    @classmethod
    @_UNCHECKED
    def of(cls, q: Array, f: Array, r: Array | None) -> Moments:
        """The moments of one batch, each [..., channels]; without `r`, nothing is owed."""
        xp = array_namespace(q)
        r = q[..., :0] if r is None else r
        tokens = math.prod(q.shape[:-1])
        q, f, r = (x.reshape(tokens, x.shape[-1]) for x in (q, f, r))
        sums = [xp.sum(x, axis=0, dtype=xp.float64) for x in (q, f, r)]
        magnitude = xp.sum(xp.abs(q), axis=0, dtype=xp.float64)
        # Products in float32, sums over batches in float64. Float32 would not hold what a channel
        # with a large mean varies by, so the means go first.
        q, f, r = (
            x - xp.astype(total / tokens, xp.float32)
            for x, total in zip((q, f, r), sums, strict=True)
        )
        second, cross, owed = (xp.astype(q.T @ x, xp.float64) for x in (q, f, r))
        sum_q, sum_f, sum_r = sums
        return cls(tokens, second, cross, owed, sum_q, sum_f, sum_r, magnitude)

    @classmethod
    def total(cls, batches: Iterable[Moments]) -> Moments:
        """Of all batches together, of which there must be one or more."""
        rest = iter(batches)
        result = next(rest)
        for batch in rest:
            result.add(batch)
        return result

    @_UNCHECKED
    def add(self, other: Moments) -> None:
        """Add another batch's (Chan, Golub and LeVeque, 1979)."""
        weight = self.count * other.count / (self.count + other.count)
        apart = [
            theirs / other.count - own / self.count
            for own, theirs in ((self.q, other.q), (self.f, other.f), (self.r, other.r))
        ]
        column = weight * apart[0][:, None]
        for name, row in zip(("second", "cross", "owed"), apart, strict=True):
            total = getattr(self, name)
            total += getattr(other, name)
            total += column * row
        for name in ("q", "f", "r", "magnitude"):
            total = getattr(self, name)
            total += getattr(other, name)
        self.count += other.count

    def check(self, reads: str) -> None:
        """CheckpointError where the activations called `reads` were not finite."""
        xp = array_namespace(self.magnitude)
        for total in (self.magnitude, xp.linalg.diagonal(self.second)):
            if not bool(xp.all(xp.isfinite(total))):
                raise CheckpointError(
                    f"the activations '{reads}' are not finite on the calibration text; "
                    f"the checkpoint's weights are damaged or too large"
                )

    @property
    def mean_magnitude(self) -> Array:
        """Mean |q| of each input channel [inputs]."""
        return self.magnitude / self.count

    @property
    def mean_square(self) -> Array:
        """Mean q q^T [inputs, inputs]: the Hessian of the squared output error."""
        mean = self.q / self.count
        return self.covariance + mean[:, None] * mean

    @property
    def covariance(self) -> Array:
        """Of q [inputs, inputs]: the Hessian where a bias makes up for the mean error."""
        return self.second / self.count

    def target(self, weight: Array, damping: float, *, residual: bool) -> Array:
        """The weight float32 [inputs, outputs] that serves q best as `weight` serves f.

        Least squares with a ridge towards `weight`: what quantization has done to the linear's
        inputs, and to the residual stream that it adds to, is made up for where it is linear in q
        (as GPTAQ and QEP do for the inputs: Li et al., 2025; Arai and Ichikawa, 2025).
        """
        xp = array_namespace(weight)
        wide = xp.astype(weight, xp.float64)
        covariance = self.covariance
        wanted = (self.cross / self.count - covariance) @ wide
        if residual:
            wanted += self.owed / self.count
        every = list(range(len(covariance)))
        covariance[every, every] += damping * float(xp.mean(xp.linalg.diagonal(covariance))) or 1.0
        change = xp.linalg.solve(covariance, wanted)
        return xp.astype(wide + change, xp.float32)

    def bias(self, weight: Array, quantized: Array, *, residual: bool) -> Array:
        """What to add to the bias so that the mean output is kept, float32 [outputs]."""
        xp = array_namespace(weight)
        kept = self.f @ xp.astype(weight, xp.float64) - self.q @ xp.astype(quantized, xp.float64)
        if residual:
            kept = kept + self.r
        return xp.astype(kept / self.count, xp.float32)
