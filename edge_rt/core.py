"""The nouns that scheduler, engines and servers share: plain data, no behaviour of their own.

Times are monotonic nanoseconds (`time.monotonic_ns`). A *row* is one sequence in the engine; a
request takes as many as it wants continuations of its prompt. A *page* is `page_tokens` positions
of key-value cache; an engine with one buffer per row offers pages of `max_context` tokens, so that
a row's block table is then a single page: its slot.

What is made for every token is a NamedTuple: a frozen dataclass takes over twice as long to make.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class FinishReason(str, enum.Enum):
    """Why a row ended; the values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


class Priority(enum.IntEnum):
    """Which requests go first; the lower value."""

    INTERACTIVE = 0
    BATCH = 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a row's tokens are chosen and when it stops.

    `temperature` 0 takes the likeliest token. `top_k` 0, `top_p` 1 and `min_p` 0 leave every token
    in. `repetition_penalty` divides (or multiplies, if negative) the logits of tokens seen in the
    prompt or the output, `presence_penalty` and `frequency_penalty` are taken off those of the
    output, `logit_bias` is added: pairs of token and bias. Before `min_tokens` no stop token is
    chosen. `seed` and the row's index decide what is drawn, whatever else runs. `logprobs` asks for
    each token's log-probability and for that many of the likeliest.
    """

    max_tokens: int = 64
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued, in `rows` independent ways.

    `id` is unique among the requests alive in a scheduler. One that has not ended at `deadline_ns`
    ends with TIMEOUT.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rows: int = 1
    priority: Priority = Priority.INTERACTIVE
    deadline_ns: int | None = None


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


class SampledToken(NamedTuple):
    """A chosen token; its log-probability and the likeliest tokens' if they were asked for.

    Log-probabilities are the model's own: before penalties, bias and temperature.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Draw(NamedTuple):
    """What a row's next token depends on besides its logits.

    `row` is its index among its request's rows. `output` grows with every token: an engine reads it
    during the call and does not keep it.
    """

    sampling: SamplingParams
    row: int
    prompt: tuple[int, ...]
    output: Sequence[int]


class PrefillChunk(NamedTuple):
    """Consecutive tokens of one row, the first at position `start`.

    The last chunk of a prompt yields a token for each of `draws`, from the same logits; the others
    have none.
    """

    request_id: str
    pages: tuple[int, ...]
    start: int
    tokens: tuple[int, ...]
    draws: tuple[Draw, ...]


class DecodeRow(NamedTuple):
    """One row that takes `token` at `position` and yields the next token."""

    request_id: str
    pages: tuple[int, ...]
    position: int
    token: int
    draw: Draw


class PageCopy(NamedTuple):
    """The first `tokens` positions of page `source` are to be those of page `target` too."""

    request_id: str
    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step: first the copies, then the prompts, then the rows that decode.

    A row is in at most one of the two lists; in `prefill` it may stand several times, its chunks in
    order.
    """

    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    copies: tuple[PageCopy, ...] = ()

    @property
    def tokens(self) -> int:
        """Positions that this step computes."""
        return sum(len(chunk.tokens) for chunk in self.prefill) + len(self.decode)


class StepResult(NamedTuple):
    """Sampled tokens: one for each draw of each chunk, one for each row; in the batch's order."""

    prefill: tuple[SampledToken, ...] = ()
    decode: tuple[SampledToken, ...] = ()


class TokenEvent(NamedTuple):
    """One token of a row, or its end, or both; each row has one event with `finish`, its last.

    `is_last` stands on exactly one event of a request: the end of its last row. `token` is None on
    an end that brings no token (a stop token is not text; cancellation; error). `message` says what
    happened when `finish` is ERROR. `admitted_ns` is when the request was first let in; an event
    with `finish` has it, unless the request never was.
    """

    request_id: str
    token: SampledToken | None
    finish: FinishReason | None = None
    row: int = 0
    is_last: bool = False
    message: str = ""
    admitted_ns: int | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step did and how long it took; telemetry and the power governor read it.

    A step that `failed` counts no tokens and no time.
    """

    started_ns: int
    prefill_tokens: int
    decode_rows: int
    prefill_ns: int
    decode_ns: int
    sampled_tokens: int
    failed: bool = False


class Load(NamedTuple):
    """What is in a scheduler: requests that wait and that run, pages held, preemptions so far."""

    queued: int
    running: int
    pages_in_use: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class PowerBudget:
    """The most that the power governor lets one step do; None is no limit."""

    max_rows: int | None = None
    prefill_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BoardInfo:
    """What the machine is; None where it does not say.

    `kind` is who reads its sensors: jetson, linux, nvml or none. `power_scope` says what the power
    in its readings is the power of.
    """

    kind: str
    model: str | None = None
    serial: str | None = None
    l4t: str | None = None
    jetpack: str | None = None
    power_scope: str | None = None


@dataclass(frozen=True, slots=True)
class BoardReading:
    """What the machine's sensors said at one time; what is not known is not there, never 0.

    `power_mw` is that of BoardInfo.power_scope, `rails_mw` that of each part by its label, which
    may overlap. `loads` are shares of 1 (gpu, emc). `throttles` count since the first reading, by
    reason. `energy_j` is the integral of `power_mw` since then, over the `metered_s` in which it
    was known; both are only there where power is. `lost` names what is missing though
    the machine has, or had, it, and why.
    """

    taken_ns: int
    power_mw: float | None = None
    rails_mw: Mapping[str, float] = field(default_factory=dict)
    energy_j: float | None = None
    metered_s: float | None = None
    temperatures_c: Mapping[str, float] = field(default_factory=dict)
    clocks_hz: Mapping[str, float] = field(default_factory=dict)
    loads: Mapping[str, float] = field(default_factory=dict)
    fans_rpm: Mapping[str, float] = field(default_factory=dict)
    throttles: Mapping[str, int] = field(default_factory=dict)
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    power_mode: str | None = None
    lost: Mapping[str, str] = field(default_factory=dict)
