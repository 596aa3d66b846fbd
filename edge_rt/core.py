"""The nouns that scheduler, engines and servers share: plain data, no behaviour of their own.

Times are monotonic nanoseconds (`time.monotonic_ns`). A *row* is one sequence in the engine; a
request takes one row (beams and n > 1 will take several). A *page* is `page_tokens` positions of
key-value cache; an engine with one buffer per row offers pages of `max_context` tokens, so that a
row's block table is then a single page: its slot.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(str, enum.Enum):
    """Why a request ended; the values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops; greedy for now."""

    max_tokens: int = 64
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued. `id` is unique among the requests alive in a scheduler."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can hold and do in one step; the scheduler plans within it."""

    max_requests: int
    max_rows: int
    max_tokens_per_step: int
    prefill_chunk: int
    pages: int
    page_tokens: int
    max_context: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive prompt tokens of one row, the first at position `start`.

    `sampling` is set on the prompt's last chunk only: that chunk yields the first new token.
    """

    request_id: str
    pages: tuple[int, ...]
    start: int
    tokens: tuple[int, ...]
    sampling: SamplingParams | None


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One row that takes `token` at `position` and yields the next token."""

    request_id: str
    pages: tuple[int, ...]
    position: int
    token: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step.

    A request is in at most one of the two lists; in `prefill` it may stand several times, its
    chunks in order.
    """

    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[DecodeRow, ...] = ()

    @property
    def tokens(self) -> int:
        """Positions that this step computes."""
        return sum(len(chunk.tokens) for chunk in self.prefill) + len(self.decode)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens, aligned with the batch; None where a chunk was not its prompt's last."""

    prefill: tuple[int | None, ...] = ()
    decode: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of a request, or its end, or both. Exactly one event of a request has `finish`.

    `token` is None on an end that brings no token (a stop token is not text; cancellation; error).
    `message` says what happened when `finish` is ERROR.
    """

    request_id: str
    token: int | None
    finish: FinishReason | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step did and how long it took; telemetry and the power governor read it."""

    started_ns: int
    prefill_tokens: int
    decode_rows: int
    prefill_ns: int
    decode_ns: int


@dataclass(frozen=True, slots=True)
class PowerBudget:
    """The most that the power governor lets one step do; None is no limit."""

    max_rows: int | None = None
    prefill_tokens: int | None = None
