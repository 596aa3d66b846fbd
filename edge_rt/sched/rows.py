"""What the scheduler knows of a request and of each of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from edge_rt.core import DecodeRow, Draw, PrefillChunk, Request


@dataclass(slots=True, eq=False)
class Row:
    """One continuation of a request's prompt.

    `cached` positions of prompt and output are in `pages`; while it decodes that is all but the
    newest token.
    """

    live: Live
    index: int
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    block_table: tuple[int, ...] = ()  # `pages` as the engine is given them
    draw: Draw = field(init=False)

    def __post_init__(self) -> None:
        self.draw = Draw(
            self.live.request.sampling, self.index, self.live.request.prompt, self.output
        )

    @property
    def tokens(self) -> int:
        """Prompt and output."""
        return len(self.live.request.prompt) + len(self.output)

    @property
    def longest(self) -> int:
        """Tokens that it may come to have."""
        return len(self.live.request.prompt) + self.live.request.sampling.max_tokens

    def hold(self, pages: list[int]) -> None:
        """Add pages to the end of the block table."""
        self.pages += pages
        self.block_table = tuple(self.pages)

    def chunks(self, size: int) -> Iterator[PrefillChunk]:
        """What is left to be put into the cache; `cached` is a multiple of `size`."""
        live, prompt = self.live, self.live.request.prompt
        tokens = prompt if live.is_fresh else (*prompt, *self.output)
        draws = tuple(row.draw for row in live.rows) if live.is_fresh else (self.draw,)
        for start in range(self.cached, len(tokens), size):
            part = tokens[start : start + size]
            is_last = start + size >= len(tokens)
            yield PrefillChunk(
                live.request.id, self.block_table, start, part, draws if is_last else ()
            )

    def decode(self) -> DecodeRow:
        """The work of one step."""
        return DecodeRow(
            self.live.request.id, self.block_table, self.cached, self.output[-1], self.draw
        )


@dataclass(slots=True, eq=False)
class Live:
    """A request on its way: `number` is its place in the order of arrival.

    `rows` are those that have not ended. Before the prompt is in the cache only the first of them
    holds pages of it; the others wait.
    """

    request: Request
    number: int
    arrived_ns: int
    rows: list[Row] = field(default_factory=list)
    admitted_ns: int | None = None  # first

    def __lt__(self, other: Live) -> bool:
        return self.number < other.number

    def admit(self, now_ns: int) -> None:
        """Let in; again, if it has given way."""
        if self.admitted_ns is None:
            self.admitted_ns = now_ns

    @property
    def is_fresh(self) -> bool:
        """No token has been sampled yet."""
        return not any(row.output for row in self.rows)
