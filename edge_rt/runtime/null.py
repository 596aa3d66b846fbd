"""The engine that computes nothing: to test and to measure everything around an engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from edge_rt.core import DecodeRow, Limits, PageCopy, PrefillChunk, SampledToken
from edge_rt.recipes import NullOptions
from edge_rt.runtime.base import Logits, Sampled
from edge_rt.runtime.rng import mix


class NullRunner:
    """Yields tokens that depend on the last token, its position and row, never on company."""

    def __init__(self, limits: Limits, options: NullOptions) -> None:
        self._limits = limits
        self._options = options

    @property
    def limits(self) -> Limits:
        """Constant for the life of the engine."""
        return self._limits

    def prefill(self, chunks: Sequence[PrefillChunk], *, want_logits: bool = False) -> Sampled:
        """Sample for each draw; those of one chunk differ by their row."""
        self._pass_time(len(chunks))
        vocabulary = self._limits.vocab_size
        tokens = [
            next_token(chunk.tokens[-1], chunk.start + len(chunk.tokens) - 1 + draw.row, vocabulary)
            for chunk in chunks
            for draw in chunk.draws
        ]
        return self._sampled(tokens, want_logits)

    def decode(self, rows: Sequence[DecodeRow], *, want_logits: bool = False) -> Sampled:
        """Sample the next token of every row."""
        self._pass_time(len(rows))
        vocabulary = self._limits.vocab_size
        tokens = [next_token(row.token, row.position + row.draw.row, vocabulary) for row in rows]
        return self._sampled(tokens, want_logits)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """There is nothing to copy."""

    def close(self) -> None:
        """There is nothing to give back."""

    def _pass_time(self, rows: int) -> None:
        duration_ms = self._options.step_ms + self._options.row_ms * rows
        if duration_ms > 0:
            time.sleep(duration_ms / 1e3)

    def _sampled(self, tokens: Sequence[int], want_logits: bool) -> Sampled:
        sampled = tuple([SampledToken(token) for token in tokens])
        return Sampled(sampled, self._logits(tokens) if want_logits else None)

    def _logits(self, tokens: Sequence[int]) -> Logits:
        logits = np.zeros((len(tokens), self._limits.vocab_size), np.float32)
        logits[np.arange(len(tokens)), list(tokens)] = 1.0
        return logits


def next_token(token: int, position: int, vocab_size: int) -> int:
    """Uniform over the vocabulary; the same for the same arguments on every machine."""
    mixed = mix(mix(token) ^ position)
    return (mixed * vocab_size) >> 64  # scales 0 to 2^64 - 1 down without the bias of a modulo
