"""The engine that computes nothing: to test and to measure everything around an engine.

It is also the strictest reader of the protocol: a call that breaks it is an AssertionError.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from edge_rt.core import DecodeRow, Limits, PrefillChunk
from edge_rt.recipes import NullOptions
from edge_rt.runtime.base import Logits, Sampled

_WORD = 2**64 - 1


class NullRunner:
    """Yields tokens that depend only on the last token and its position, never on company."""

    def __init__(self, limits: Limits, options: NullOptions) -> None:
        self._limits = limits
        self._options = options

    @property
    def limits(self) -> Limits:
        """Constant for the life of the engine."""
        return self._limits

    def prefill(self, chunks: Sequence[PrefillChunk], *, want_logits: bool = False) -> Sampled:
        """Sample where the chunk is its prompt's last."""
        self._check_chunks(chunks)
        self._pass_time(len(chunks))
        tokens = tuple(
            None
            if chunk.sampling is None
            else next_token(
                chunk.tokens[-1], chunk.start + len(chunk.tokens) - 1, self._limits.vocab_size
            )
            for chunk in chunks
        )
        return self._sampled(tokens, want_logits)

    def decode(self, rows: Sequence[DecodeRow], *, want_logits: bool = False) -> Sampled:
        """Sample the next token of every row."""
        self._check_rows(rows)
        self._pass_time(len(rows))
        tokens = tuple(next_token(row.token, row.position, self._limits.vocab_size) for row in rows)
        return self._sampled(tokens, want_logits)

    def close(self) -> None:
        """There is nothing to give back."""

    def _pass_time(self, rows: int) -> None:
        duration_ms = self._options.step_ms + self._options.row_ms * rows
        if duration_ms > 0:
            time.sleep(duration_ms / 1e3)

    def _sampled(self, tokens: tuple[int | None, ...], want_logits: bool) -> Sampled:
        return Sampled(tokens, self._logits(tokens) if want_logits else None)

    def _logits(self, tokens: Sequence[int | None]) -> Logits:
        sampled = [token for token in tokens if token is not None]
        logits = np.zeros((len(sampled), self._limits.vocab_size), np.float32)
        logits[np.arange(len(sampled)), sampled] = 1.0
        return logits

    def _check_chunks(self, chunks: Sequence[PrefillChunk]) -> None:
        ends: dict[str, int] = {}
        for chunk in chunks:
            size = len(chunk.tokens)
            assert 1 <= size <= self._limits.prefill_chunk, chunk
            assert chunk.start == ends.get(chunk.request_id, chunk.start), "chunks out of order"
            ends[chunk.request_id] = chunk.start + size
            self._check_positions(chunk.pages, chunk.start, size)
            assert all(0 <= token < self._limits.vocab_size for token in chunk.tokens), chunk
        assert len(ends) <= self._limits.max_rows, f"{len(ends)} rows"
        assert sum(len(chunk.tokens) for chunk in chunks) <= self._limits.max_tokens_per_step
        _check_owners(chunks)

    def _check_rows(self, rows: Sequence[DecodeRow]) -> None:
        for row in rows:
            self._check_positions(row.pages, row.position, 1)
            assert 0 <= row.token < self._limits.vocab_size, row
        assert len({row.request_id for row in rows}) == len(rows), "a request decodes twice"
        assert len(rows) <= min(self._limits.max_rows, self._limits.max_tokens_per_step)
        _check_owners(rows)

    def _check_positions(self, pages: tuple[int, ...], start: int, size: int) -> None:
        assert all(0 <= page < self._limits.pages for page in pages), pages
        assert len(set(pages)) == len(pages), f"a block table names a page twice: {pages}"
        end = min(self._limits.max_context, len(pages) * self._limits.page_tokens)
        assert 0 <= start <= end - size, f"{size} positions from {start}, there are {end}"


def next_token(token: int, position: int, vocab_size: int) -> int:
    """Uniform over the vocabulary; the same for the same arguments on every machine."""
    mixed = _mix(_mix(token) ^ position)
    return (mixed * vocab_size) >> 64  # scales 0 to 2^64 - 1 down without the bias of a modulo


def _mix(value: int) -> int:
    """SplitMix64: spreads one integer over 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _check_owners(work: Sequence[PrefillChunk] | Sequence[DecodeRow]) -> None:
    owners: dict[int, str] = {}
    for item in work:
        for page in item.pages:
            owner = owners.setdefault(page, item.request_id)
            assert owner == item.request_id, f"page {page}: '{owner}' and '{item.request_id}'"
