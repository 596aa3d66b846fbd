"""What the calibration text does to a model: moments of the activations that linears read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace, device

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
            f"give the recipe a longer calibration.text or a smaller calibration.tokens"
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

    `q`, `lost` (f - q) and `magnitude` |q|, float64 [inputs]; `residual` [n_embd] is what the
    quantized model's residual stream lacks (r). With the means taken off: `scatter` q q^T float64
    and `drift` q (f - q)^T float32, both [inputs, inputs], and `owed` q r^T float32
    [inputs, n_embd].
    """

    count: int
    scatter: Array
    drift: Array
    owed: Array
    q: Array
    lost: Array
    residual: Array
    magnitude: Array

    @classmethod
    def none(cls, inputs: int, outputs: int, like: Array) -> Moments:
        """Of no tokens, on the device of `like`; `outputs` is n_embd, or 0 where nothing is owed.

        `inputs` are the channels of q and f.
        """
        xp = array_namespace(like)

        def zeros(*shape: int, dtype: Any = xp.float64) -> Array:
            return xp.zeros(shape, dtype=dtype, device=device(like))

        return cls(
            count=0,
            scatter=zeros(inputs, inputs),
            drift=zeros(inputs, inputs, dtype=xp.float32),
            owed=zeros(inputs, outputs, dtype=xp.float32),
            q=zeros(inputs),
            lost=zeros(inputs),
            residual=zeros(outputs),
            magnitude=zeros(inputs),
        )

    @classmethod
    def total(cls, batches: Iterable[tuple[Array, Array, Array | None]]) -> Moments:
        """Of batches (q, f, r), each [..., channels]; with `r` None, nothing is owed.

        There must be one batch or more.
        """
        result = None
        for q, f, r in batches:
            residual = q[..., :0] if r is None else r
            result = result or cls.none(q.shape[-1], residual.shape[-1], q)
            result.add(q, f, residual)
        assert result is not None
        return result

    @_UNCHECKED
    def add(self, q: Array, f: Array, r: Array) -> None:
        """Add one batch's, each [..., channels]: products in float32, sums over batches in float64.

        Float32 would not hold what a channel with a large mean varies by, so the batch's mean is
        taken off first. By what that is apart from the mean so far, the sums grow as by one more
        token (Chan, Golub and LeVeque, 1979).
        """
        xp = array_namespace(q)
        tokens = math.prod(q.shape[:-1])
        apart_by = math.sqrt(self.count * tokens / (self.count + tokens))

        def centred(x: Array, total: Array) -> Array:
            x = x.reshape(tokens, x.shape[-1])
            mean = xp.sum(x, axis=0, dtype=xp.float64) / tokens
            apart = apart_by * (mean - total / (self.count or 1))
            total += tokens * mean
            rows = (x - xp.astype(mean, xp.float32), xp.astype(apart, xp.float32)[None, :])
            return xp.concat(rows)

        left = centred(q, self.q)
        self.scatter += left.T @ left
        self.drift += left.T @ centred(f - q, self.lost)
        self.owed += left.T @ centred(r, self.residual)
        self.magnitude += xp.sum(xp.abs(q.reshape(tokens, -1)), axis=0, dtype=xp.float64)
        self.count += tokens

    def check(self, reads: str) -> None:
        """CheckpointError where the activations called `reads` were not finite."""
        xp = array_namespace(self.magnitude)
        for total in (self.magnitude, xp.linalg.diagonal(self.scatter)):
            if not bool(xp.all(xp.isfinite(total))):
                raise CheckpointError(
                    f"the activations '{reads}' are not finite on the calibration text; "
                    f"the checkpoint's weights are damaged or too large"
                )

    @property
    def mean_magnitude(self) -> Array:
        """Mean |q| of each input channel [inputs]."""
        return self.magnitude / self.count

    def about_zero(self) -> Array:
        """As `scatter`, without taking off the mean: the Hessian where no bias makes up for it."""
        return self.scatter + self.q[:, None] * (self.q / self.count)

    def owed_by(self, weight: Array, *, residual: bool) -> Array:
        """Sum over tokens of q times what the outputs of `weight` lack [inputs, outputs].

        The weight that makes up for it, in the least squares, is off by the covariance's inverse
        times this: what quantization has done to the linear's inputs, and to the residual stream
        that it adds to (as GPTAQ and QEP do for the inputs: Li et al., 2025; Arai and Ichikawa,
        2025).
        """
        owed = self.drift @ weight
        if residual:
            owed += self.owed
        return owed

    def bias(self, weight: Array, quantized: Array, *, residual: bool) -> Array:
        """What to add to the bias so that the mean output is kept, float32 [outputs].

        `weight` and `quantized` float32 [inputs, outputs].
        """
        kept = self._mean(self.q) @ (weight - quantized) + self._mean(self.lost) @ weight
        return kept + self._mean(self.residual) if residual else kept

    def _mean(self, total: Array) -> Array:
        xp = array_namespace(total)
        return xp.astype(total / self.count, xp.float32)
