"""Which request does what in the next step.

A request is queued, then in prefill, then decoding, and leaves with exactly one terminal event.
A prompt is cut at multiples of `prefill_chunk` and nowhere else, whatever else runs: the engine
does the same arithmetic for a request alone and in company, so its tokens are the same too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from edge_rt.core import (
    Batch,
    DecodeRow,
    FinishReason,
    Limits,
    PowerBudget,
    PrefillChunk,
    Request,
    StepResult,
    TokenEvent,
)
from edge_rt.errors import RequestError
from edge_rt.sched.pages import PagePool

_NO_CAP = PowerBudget()


@dataclass(slots=True)
class _Row:
    """An admitted request: its pages, and how far it has come."""

    request: Request
    pages: tuple[int, ...]
    prefilled: int = 0
    generated: int = 0
    token: int | None = None  # the newest, not yet in the cache


class Scheduler:
    """Plans one step at a time: `schedule`, then `finish` or `fail` with what came of it.

    Not thread-safe. `now_ns` is monotonic nanoseconds and never runs back between calls.
    """

    def __init__(self, limits: Limits) -> None:
        assert min(dataclasses.astuple(limits)) >= 1, limits
        assert limits.prefill_chunk <= limits.max_tokens_per_step, limits
        self._limits = limits
        self._pool = PagePool(limits.pages)
        # Insertion order is the queue, the order of admission, and the turn to decode.
        self._queued: dict[str, Request] = {}
        self._prefilling: dict[str, _Row] = {}
        self._decoding: dict[str, _Row] = {}
        self._outstanding: Batch | None = None
        self._cancelled: dict[str, None] = {}  # in the outstanding batch; ended when it is back
        self._now_ns = 0

    @property
    def queued(self) -> int:
        """Requests that wait for admission."""
        return len(self._queued)

    @property
    def running(self) -> int:
        """Requests that hold pages."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def is_idle(self) -> bool:
        """No request lives."""
        return not self._queued and not self.running

    def validate(self, request: Request) -> None:
        """Raise RequestError if this request can never be served; safe from any thread."""
        prompt, max_tokens = len(request.prompt), request.sampling.max_tokens
        # Types too: a float that gets in would break a step, and with it everyone's.
        for value in (max_tokens, *request.prompt):
            if type(value) is not int:
                raise RequestError(f"tokens and max_tokens are whole numbers, found {value!r}")
        fits = min(self._limits.max_context, self._limits.pages * self._limits.page_tokens)
        if prompt < 1:
            raise RequestError("the prompt is empty; it needs at least 1 token")
        if max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, found {max_tokens}")
        if prompt + max_tokens > fits:
            raise RequestError(
                f"a prompt of {prompt} tokens and max_tokens {max_tokens} are more than the "
                f"{fits} tokens of a request; {_what_fits(prompt, max_tokens, fits)}"
            )
        for token in request.prompt:
            if not 0 <= token < self._limits.vocab_size:
                raise RequestError(
                    f"token id {token} in the prompt is not in the vocabulary, "
                    f"0 to {self._limits.vocab_size - 1}"
                )

    def add(self, request: Request) -> None:
        """Queue a request; RequestError if it can never be served or its id is taken."""
        self.validate(request)
        if self._is_live(request.id):
            raise RequestError(f"request id '{request.id}' is in use; wait for its end")
        self._queued[request.id] = request

    def cancel(self, request_id: str) -> TokenEvent | None:
        """End a request and return its terminal event.

        None if it does not live (it may have just ended), or if it is in the outstanding batch:
        then `finish` or `fail` returns the event, and what the batch sampled for it is dropped.
        """
        if not self._is_live(request_id):
            return None
        if request_id in _request_ids(self._outstanding):
            self._cancelled[request_id] = None
            return None
        return self._end(request_id, FinishReason.CANCELLED)

    def cancel_all(self) -> list[TokenEvent]:
        """End every request and forget the outstanding batch; the engine must be at rest."""
        self._outstanding = None
        self._cancelled.clear()
        live = [*self._decoding, *self._prefilling, *self._queued]
        return [self._end(request_id, FinishReason.CANCELLED) for request_id in live]

    def schedule(self, now_ns: int, budget: PowerBudget = _NO_CAP) -> Batch:
        """The work of the next step; empty, and then not to be finished, only when idle.

        `budget` slows work down but never stops it: one row or one chunk always goes.
        """
        assert self._outstanding is None, "the last batch has neither finished nor failed"
        self._advance_clock(now_ns)
        self._admit()
        decode = self._plan_decode(budget)
        prefill = self._plan_prefill(budget, decode_rows=len(decode))
        batch = Batch(prefill, decode)
        if batch.tokens:
            self._outstanding = batch
        assert batch.tokens or self.is_idle, "requests live, but none can move"
        return batch

    def finish(self, result: StepResult, now_ns: int) -> list[TokenEvent]:
        """Take in what the outstanding batch sampled."""
        self._advance_clock(now_ns)
        batch, events = self._take_outstanding()
        for chunk, sampled in zip(batch.prefill, result.prefill, strict=True):
            assert (sampled is None) == (chunk.sampling is None), chunk
            if row := self._prefilling.get(chunk.request_id):
                row.prefilled += len(chunk.tokens)
                if sampled is not None:
                    self._decoding[chunk.request_id] = self._prefilling.pop(chunk.request_id)
                    events.append(self._accept(row, sampled))
        for planned, token in zip(batch.decode, result.decode, strict=True):
            if row := self._decoding.get(planned.request_id):
                events.append(self._accept(row, token))
        return events

    def fail(self, message: str, now_ns: int) -> list[TokenEvent]:
        """The outstanding batch raised: its requests end with ERROR, the others live on."""
        self._advance_clock(now_ns)
        batch, events = self._take_outstanding()
        for request_id in _request_ids(batch):
            if self._is_live(request_id):
                events.append(self._end(request_id, FinishReason.ERROR, message=message))
        return events

    def check_integrity(self) -> None:
        """Assert that no page leaked or has two owners, and that every count agrees."""
        rows = [*self._prefilling.values(), *self._decoding.values()]
        self._pool.check_integrity(page for row in rows for page in row.pages)
        live = {*self._queued, *self._prefilling, *self._decoding}
        assert len(live) == self.queued + self.running, "a request is in two stages"
        assert self.running <= min(self._limits.max_requests, self._limits.max_rows)
        assert self._cancelled.keys() <= _request_ids(self._outstanding).keys() & live
        for row in rows:
            assert len(row.pages) == self._pages_needed(row.request), row
        for row in self._prefilling.values():
            assert row.prefilled < len(row.request.prompt), row
            assert row.generated == 0, row
        for row in self._decoding.values():
            assert row.prefilled == len(row.request.prompt), row
            assert 1 <= row.generated < row.request.sampling.max_tokens, row

    def _is_live(self, request_id: str) -> bool:
        return any(
            request_id in stage for stage in (self._queued, self._prefilling, self._decoding)
        )

    def _advance_clock(self, now_ns: int) -> None:
        assert now_ns >= self._now_ns, f"the clock ran back from {self._now_ns} to {now_ns} ns"
        self._now_ns = now_ns

    def _pages_needed(self, request: Request) -> int:
        tokens = len(request.prompt) + request.sampling.max_tokens
        return -(-tokens // self._limits.page_tokens)

    def _admit(self) -> None:
        """Let requests in strictly in order: a small one never overtakes one that waits for pages.

        Admission takes all pages that a request can come to need, so nothing that runs ever waits
        for a page.
        """
        places = min(self._limits.max_requests, self._limits.max_rows)
        while self._queued and self.running < places:
            request_id, request = next(iter(self._queued.items()))
            needed = self._pages_needed(request)
            if needed > self._pool.free:
                return
            del self._queued[request_id]
            self._prefilling[request_id] = _Row(request, self._pool.allocate(needed))

    def _plan_decode(self, budget: PowerBudget) -> tuple[DecodeRow, ...]:
        rows = min(len(self._decoding), self._limits.max_tokens_per_step)
        if budget.max_rows is not None:
            rows = min(rows, max(1, budget.max_rows))
        turn = list(self._decoding)[:rows]
        for request_id in turn:  # to the back, so that where not all rows go, all get their turn
            self._decoding[request_id] = self._decoding.pop(request_id)
        return tuple(_decode_row(self._decoding[request_id]) for request_id in turn)

    def _plan_prefill(self, budget: PowerBudget, decode_rows: int) -> tuple[PrefillChunk, ...]:
        room = self._limits.max_tokens_per_step - decode_rows
        if budget.prefill_tokens is not None:
            room = min(room, budget.prefill_tokens)
        chunks: list[PrefillChunk] = []
        for row in self._prefilling.values():
            for chunk in _remaining_chunks(row, self._limits.prefill_chunk):
                step_is_empty = not chunks and not decode_rows
                if len(chunk.tokens) > room and not step_is_empty:
                    return tuple(chunks)
                chunks.append(chunk)
                room -= len(chunk.tokens)
        return tuple(chunks)

    def _take_outstanding(self) -> tuple[Batch, list[TokenEvent]]:
        """The batch that is back, and the ends of those cancelled while it was out."""
        batch = self._outstanding
        assert batch is not None, "no batch is outstanding"
        self._outstanding = None
        events = [self._end(request_id, FinishReason.CANCELLED) for request_id in self._cancelled]
        self._cancelled.clear()
        return batch, events

    def _accept(self, row: _Row, token: int) -> TokenEvent:
        sampling = row.request.sampling
        row.token = token
        row.generated += 1
        if token in sampling.stop_token_ids:
            return self._end(row.request.id, FinishReason.STOP)
        if row.generated == sampling.max_tokens:
            return self._end(row.request.id, FinishReason.LENGTH, token)
        return TokenEvent(row.request.id, token)

    def _end(
        self, request_id: str, finish: FinishReason, token: int | None = None, message: str = ""
    ) -> TokenEvent:
        """The only way out of the scheduler: forget the request and free its pages."""
        if self._queued.pop(request_id, None) is None:
            stage = self._prefilling if request_id in self._prefilling else self._decoding
            self._pool.release(stage.pop(request_id).pages)
        return TokenEvent(request_id, token, finish, message)


def _what_fits(prompt: int, max_tokens: int, fits: int) -> str:
    ways = []
    if prompt < fits:
        ways.append(f"max_tokens {fits - prompt} with this prompt")
    if max_tokens < fits:
        ways.append(f"a prompt of {fits - max_tokens} tokens with this max_tokens")
    return f"what fits: {' or '.join(ways or [f'a prompt of {fits - 1} tokens with max_tokens 1'])}"


def _request_ids(batch: Batch | None) -> dict[str, None]:
    """The requests in a batch, once each, in its order."""
    if batch is None:
        return {}
    prefilling = dict.fromkeys(chunk.request_id for chunk in batch.prefill)
    decoding = dict.fromkeys(row.request_id for row in batch.decode)
    return prefilling | decoding


def _remaining_chunks(row: _Row, size: int) -> Iterator[PrefillChunk]:
    """What is left of a prompt; `prefilled` is a multiple of `size`, as only whole chunks go."""
    prompt = row.request.prompt
    for start in range(row.prefilled, len(prompt), size):
        is_last = start + size >= len(prompt)
        yield PrefillChunk(
            request_id=row.request.id,
            pages=row.pages,
            start=start,
            tokens=prompt[start : start + size],
            sampling=row.request.sampling if is_last else None,
        )


def _decode_row(row: _Row) -> DecodeRow:
    assert row.token is not None, "a row decodes only after its prompt has yielded a token"
    return DecodeRow(
        request_id=row.request.id,
        pages=row.pages,
        position=len(row.request.prompt) + row.generated - 1,
        token=row.token,
        sampling=row.request.sampling,
    )
