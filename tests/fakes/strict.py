"""The strictest reader of the Runner protocol: whatever breaks it is an AssertionError.

It keeps what a cache would hold, token by token, so that a row whose pages are not its own, or a
copy that is missing, shows as a context that is not the row's prompt and output.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_rt.core import DecodeRow, Draw, Limits, PageCopy, PrefillChunk
from edge_rt.runtime.base import Runner, Sampled


class StrictRunner:
    """Checks every call, then hands it to `inner`."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._cells: dict[tuple[int, int], int] = {}  # (page, offset) -> token

    @property
    def limits(self) -> Limits:
        return self._inner.limits

    def prefill(self, chunks: Sequence[PrefillChunk], *, want_logits: bool = False) -> Sampled:
        limits = self.limits
        assert chunks
        assert sum(len(chunk.tokens) for chunk in chunks) <= limits.max_tokens_per_step
        ends: dict[tuple[int, ...], int] = {}
        tables = {chunk.pages for chunk in chunks}
        assert len(tables) <= limits.max_rows
        for chunk in chunks:
            size = len(chunk.tokens)
            assert 1 <= size <= limits.prefill_chunk, chunk
            assert chunk.start % limits.prefill_chunk == 0, "cut elsewhere than at a chunk"
            assert chunk.start == ends.get(chunk.pages, chunk.start), "chunks out of order"
            ends[chunk.pages] = chunk.start + size
            self._check_table(chunk.pages, chunk.start + size)
            for position, token in enumerate(chunk.tokens, chunk.start):
                self._write(chunk.pages, position, token, tables)
            for draw in chunk.draws:
                assert size + chunk.start == len(draw.prompt) + len(draw.output)
                self._check_context(chunk.pages, draw, size + chunk.start)
        return self._inner.prefill(chunks, want_logits=want_logits)

    def decode(self, rows: Sequence[DecodeRow], *, want_logits: bool = False) -> Sampled:
        assert 1 <= len(rows) <= min(self.limits.max_rows, self.limits.max_tokens_per_step)
        assert len({(row.request_id, row.draw.row) for row in rows}) == len(rows), "decodes twice"
        tables = {row.pages for row in rows}
        assert len(tables) == len(rows), "two rows have one block table"
        for row in rows:
            self._check_table(row.pages, row.position + 1)
            self._write(row.pages, row.position, row.token, tables)
            self._check_context(row.pages, row.draw, row.position + 1)
        return self._inner.decode(rows, want_logits=want_logits)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        for one in copies:
            assert one.source != one.target, one
            assert min(one.source, one.target) >= 0, one
            assert max(one.source, one.target) < self.limits.pages, one
            assert 1 <= one.tokens <= self.limits.page_tokens, one
            for offset in range(one.tokens):
                self._cells[one.target, offset] = self._cells[one.source, offset]
        self._inner.copy(copies)

    def close(self) -> None:
        self._inner.close()

    def _check_table(self, pages: tuple[int, ...], end: int) -> None:
        assert all(0 <= page < self.limits.pages for page in pages), pages
        assert len(set(pages)) == len(pages), f"a block table names a page twice: {pages}"
        room = min(self.limits.max_context, len(pages) * self.limits.page_tokens)
        assert end <= room, f"{end} positions, there is room for {room}"

    def _write(
        self, pages: tuple[int, ...], position: int, token: int, tables: set[tuple[int, ...]]
    ) -> None:
        assert 0 <= token < self.limits.vocab_size, token
        page = pages[position // self.limits.page_tokens]
        others = [table for table in tables if table != pages and page in table]
        assert not others, f"page {page} is written for {pages} and read for {others}"
        self._cells[page, position % self.limits.page_tokens] = token

    def _check_context(self, pages: tuple[int, ...], draw: Draw, end: int) -> None:
        expected = [*draw.prompt, *draw.output]
        found = [
            self._cells.get((pages[p // self.limits.page_tokens], p % self.limits.page_tokens))
            for p in range(end)
        ]
        assert found == expected[:end], f"the cache holds {found}, the row is {expected}"
