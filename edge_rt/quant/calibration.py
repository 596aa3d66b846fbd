"""What the calibration text does to a model: activation statistics, streamed layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_rt.errors import CheckpointError, ConfigError
from edge_rt.model.gptj import F32, Layer, ModelConfig, forward_layer

_BATCH_TOKENS = 1024  # bounds the activations that are alive at once


@dataclass(slots=True)
class ChannelMeans:
    """Running mean of |x| for each input channel of the linears that read one activation."""

    total: npt.NDArray[np.float64]
    count: int = 0

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """[channels]."""
        return self.total / max(self.count, 1)


def sample_sequences(
    tokens: npt.NDArray[np.int64], sequences: int, length: int
) -> npt.NDArray[np.int64]:
    """Cut `sequences` windows of `length` tokens, evenly spread over the text, without overlap.

    ConfigError when the text holds fewer tokens than one window; fewer windows when it holds
    fewer than asked for.
    """
    available = len(tokens) // length
    if available == 0:
        raise ConfigError(
            f"the calibration text has {len(tokens)} tokens, less than one sequence of {length}; "
            f"give a longer text"
        )
    windows = tokens[: available * length].reshape(available, length)
    chosen = np.linspace(0, available - 1, min(sequences, available)).astype(np.int64)
    return windows[chosen]


def observe_layer(
    hidden: F32, layer: Layer, config: ModelConfig
) -> tuple[F32, dict[str, ChannelMeans]]:
    """Run one layer over `hidden` [sequences, tokens, n_embd].

    Returns the layer's output, and for each activation that linears read (LinearSpec.reads) the
    mean of its channels' magnitudes. CheckpointError where they are not finite.
    """
    means: dict[str, ChannelMeans] = {}

    def tap(reads: str, x: F32) -> None:
        flat = np.abs(x.reshape(-1, x.shape[-1]))
        seen = means.setdefault(reads, ChannelMeans(np.zeros(flat.shape[1], np.float64)))
        seen.total += flat.sum(0, dtype=np.float64)
        seen.count += len(flat)

    outputs = [forward_layer(batch, layer, config, tap) for batch in _batches(hidden)]
    for reads, seen in means.items():
        if not np.isfinite(seen.total).all():
            raise CheckpointError(
                f"the activations '{reads}' are not finite on the calibration text; "
                f"the checkpoint's weights are damaged or too large"
            )
    return np.concatenate(outputs), means


def _batches(hidden: F32) -> Iterator[F32]:
    step = max(1, _BATCH_TOKENS // hidden.shape[1])
    for start in range(0, len(hidden), step):
        yield hidden[start : start + step]
