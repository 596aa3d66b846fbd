"""Which request does what in the next step.

A request is queued, then its prompt goes into the cache, then its rows decode until each has ended.
A prompt is cut at multiples of `prefill_chunk` and nowhere else, whatever else runs: the engine
does the same arithmetic for a request alone and in company, so its tokens are the same too.

Pages are taken as they are needed. When none is left, the request that came last in the order of
admission gives up all of its pages and waits again; what it has generated is then computed anew, as
if it were part of the prompt. The first in that order is never the one to give way, and any request
fits when it is alone: so there is always one that moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from edge_rt.core import (
    Batch,
    FinishReason,
    Limits,
    PageCopy,
    PowerBudget,
    PrefillChunk,
    Request,
    SampledToken,
    StepResult,
    TokenEvent,
)
from edge_rt.errors import RequestError
from edge_rt.sched import admission
from edge_rt.sched.deadlines import Deadlines
from edge_rt.sched.pages import PagePool
from edge_rt.sched.queue import Queue, SchedulerOptions
from edge_rt.sched.rows import Live, Row

_NO_CAP = PowerBudget()
_DEFAULT = SchedulerOptions()


class Scheduler:
    """Plans one step at a time: `schedule`, then `finish` or `fail` with what came of it.

    Not thread-safe. `now_ns` is monotonic nanoseconds and never runs back between calls.
    """

    def __init__(self, limits: Limits, options: SchedulerOptions = _DEFAULT) -> None:
        assert min(dataclasses.astuple(limits)) >= 1, limits
        assert limits.prefill_chunk <= limits.max_tokens_per_step, limits
        self._limits = limits
        self._window_ns = int(options.batching_window_ms * 1e6)
        self._pool = PagePool(limits.pages)
        self._live: dict[str, Live] = {}
        self._queue = Queue(options)
        # Insertion order is the order of admission, and the turn to decode.
        self._running: dict[Live, None] = {}
        self._prefilling: dict[Row, None] = {}
        self._decoding: dict[Row, None] = {}
        self._copies: list[PageCopy] = []
        self._deadlines = Deadlines(self._live)
        self._outstanding: tuple[Batch, list[Row], list[Row]] | None = None
        self._ending: dict[Row, FinishReason] = {}  # once the outstanding batch is back
        self._arrivals = 0
        self.preemptions = 0
        self._credit = 0  # prefill tokens that the power budget has allowed and that have not gone
        self._now_ns = 0

    @property
    def queued(self) -> int:
        """Requests that wait for admission."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that hold pages."""
        return len(self._running)

    @property
    def running_rows(self) -> int:
        """Rows of the running requests."""
        return sum(len(live.rows) for live in self._running)

    @property
    def pages_in_use(self) -> int:
        """Pages of the cache that are not free."""
        return self._limits.pages - self._pool.free

    @property
    def is_idle(self) -> bool:
        """No request lives."""
        return not self._live

    @property
    def wake_ns(self) -> int | None:
        """When `schedule` may have work that it has not now; None if only a new request brings it.

        Only after `schedule` has returned an empty batch.
        """
        live = self._queue.first(self._now_ns)
        if live is None:
            return None
        window_ns, first_ns = live.arrived_ns + self._window_ns, self._deadlines.first_ns
        return window_ns if first_ns is None else min(window_ns, first_ns)

    def validate(self, request: Request) -> None:
        """Raise RequestError if this request can never be served; safe from any thread."""
        admission.check(request, self._limits)

    def add(self, request: Request, now_ns: int) -> None:
        """Queue a request; RequestError if it can never be served or its id is taken."""
        self._advance_clock(now_ns)
        self.validate(request)
        if request.id in self._live:
            raise RequestError(f"request id '{request.id}' is in use; wait for its end")
        live = Live(request, self._arrivals, now_ns)
        live.rows = [Row(live, index) for index in range(request.rows)]
        self._arrivals += 1
        self._live[request.id] = live
        self._queue.push(live)
        if request.deadline_ns is not None:
            self._deadlines.add(request.deadline_ns, request.id)

    def cancel(
        self,
        request_id: str,
        index: int | None = None,
        finish: FinishReason = FinishReason.CANCELLED,
    ) -> list[TokenEvent]:
        """End a request, or one of its rows, and return the ends.

        What does not live (it may have just ended) is ignored. What is in the outstanding batch
        ends when `finish` or `fail` returns it; what the batch sampled for it is dropped.
        """
        live = self._live.get(request_id)
        if live is None:
            return []
        # Before the first tokens no row has anything of its own: all end together.
        rows = [row for row in live.rows if live.is_fresh or index in (None, row.index)]
        out = self._rows_out()
        if live.is_fresh and not out.isdisjoint(rows):
            out.update(rows)
        self._ending.update((row, finish) for row in rows if row in out)
        return [self._end(row, finish) for row in rows if row not in out]

    def cancel_all(self) -> list[TokenEvent]:
        """End every request and forget the outstanding batch; the engine must be at rest."""
        self._outstanding = None
        self._ending.clear()
        self._copies.clear()
        rows = [row for live in self._live.values() for row in live.rows]
        return [self._end(row, FinishReason.CANCELLED) for row in rows]

    def expire(self, now_ns: int) -> list[TokenEvent]:
        """End the requests whose deadline has passed; no batch may be out."""
        self._advance_clock(now_ns)
        assert self._outstanding is None
        events = []
        for request_id in self._deadlines.passed(now_ns):
            live = self._live.get(request_id)
            deadline_ns = live.request.deadline_ns if live else None
            # The id may be another request's by now.
            if live and deadline_ns is not None and deadline_ns <= now_ns:
                events += [self._end(row, FinishReason.TIMEOUT) for row in list(live.rows)]
        return events

    def schedule(self, now_ns: int, budget: PowerBudget = _NO_CAP) -> Batch:
        """The work of the next step; empty, and then not to be finished, if there is none.

        That is when no request lives, or in the batching window. `budget` slows work down but never
        stops it: one row or one chunk always goes.
        """
        assert self._outstanding is None, "the last batch has neither finished nor failed"
        self._advance_clock(now_ns)
        if self._waits_for_company():
            return Batch()
        self._admit()
        decoding = self._plan_decode(budget)
        decode = tuple([row.decode() for row in decoding])
        prefill, prefilling = self._plan_prefill(budget, decode_rows=len(decode))
        batch = Batch(prefill, decode, tuple(self._copies))
        if batch.tokens:
            self._copies.clear()
            self._outstanding = batch, prefilling, decoding
        assert batch.tokens or self.is_idle, "requests live, but none can move"
        return batch

    def finish(self, result: StepResult, now_ns: int) -> list[TokenEvent]:
        """Take in what the outstanding batch sampled."""
        self._advance_clock(now_ns)
        batch, prefilling, decoding, events = self._take_outstanding()
        sampled = iter(result.prefill)
        for chunk, row in zip(batch.prefill, prefilling, strict=True):
            tokens = [next(sampled) for _ in chunk.draws]
            if row in self._prefilling:
                row.cached += len(chunk.tokens)
                if chunk.draws:
                    events += self._prefilled(row, tokens)
        assert next(sampled, None) is None, "more tokens than draws"
        for row, token in zip(decoding, result.decode, strict=True):
            if row in self._decoding:
                row.cached += 1
                events.append(self._accept(row, token))
        return events

    def fail(self, message: str, now_ns: int) -> list[TokenEvent]:
        """The outstanding batch raised: its requests end with ERROR, the others live on."""
        self._advance_clock(now_ns)
        batch, prefilling, decoding, events = self._take_outstanding()
        ids = [row.live.request.id for row in (*prefilling, *decoding)]
        ids += [copy.request_id for copy in batch.copies]
        for request_id in dict.fromkeys(ids):
            if live := self._live.get(request_id):
                for row in list(live.rows):
                    events.append(self._end(row, FinishReason.ERROR, message=message))
        return events

    def check_integrity(self) -> None:
        """Assert that no page leaked or has a holder too many, and that every count agrees."""
        rows = [row for live in self._live.values() for row in live.rows]
        self._pool.check_integrity(page for row in rows for page in row.pages)
        assert len(self._live) == self.queued + self.running, "a request is in two stages"
        assert self.running <= self._limits.max_requests
        assert self.running_rows <= self._limits.max_rows
        assert not self._prefilling.keys() & self._decoding.keys()
        for row in rows:
            running = row.live in self._running
            assert running != (row.live in self._queue), row
            assert running or not row.pages, "a queued request holds pages"
            assert len(row.output) < row.live.request.sampling.max_tokens, row
            assert row.block_table == tuple(row.pages), row
            assert row.cached <= len(row.pages) * self._limits.page_tokens, row
            if row in self._decoding:
                assert row.cached == row.tokens - 1, row
            elif row in self._prefilling:
                assert row.cached < row.tokens, row
            elif running:
                assert row.live.is_fresh, "a row is in no stage"

    def _rows_out(self) -> set[Row]:
        if self._outstanding is None:
            return set()
        _, prefilling, decoding = self._outstanding
        return {*prefilling, *decoding}

    def _advance_clock(self, now_ns: int) -> None:
        assert now_ns >= self._now_ns, f"the clock ran back from {self._now_ns} to {now_ns} ns"
        self._now_ns = now_ns

    def _waits_for_company(self) -> bool:
        first = None if self._running else self._queue.first(self._now_ns)
        if first is None or self.queued >= self._limits.max_requests:
            return False
        return self._now_ns < first.arrived_ns + self._window_ns

    def _admit(self) -> None:
        """Let requests in strictly in order: a small one never overtakes one that waits for pages.

        What already runs may each need one page more in the next step: those are left to it.
        """
        while (live := self._queue.first(self._now_ns)) and (
            self.running < self._limits.max_requests
            and self.running_rows + len(live.rows) <= self._limits.max_rows
        ):
            leader, *others = live.rows
            needed = [admission.pages_for(row.tokens, self._limits) for row in live.rows]
            if live.is_fresh:  # the others share the prompt's full pages
                shared = leader.tokens // self._limits.page_tokens
                needed = [needed[0], *(needed[0] - shared for _ in others)]
            growing = sum(self._may_grow(row) for other in self._running for row in other.rows)
            if sum(needed) + growing > self._pool.free:
                return
            self._queue.remove(live)
            self._running[live] = None
            live.admit(self._now_ns)
            for row, count in zip(live.rows, needed, strict=True):
                row.hold(self._pool.allocate(count))
                if row is leader or not live.is_fresh:
                    self._prefilling[row] = None

    def _may_grow(self, row: Row) -> bool:
        return len(row.pages) < admission.pages_for(row.longest, self._limits)

    def _plan_decode(self, budget: PowerBudget) -> list[Row]:
        rows = min(len(self._decoding), self._limits.max_tokens_per_step)
        if budget.max_rows is not None:
            rows = min(rows, max(1, budget.max_rows))
        turn: list[Row] = []
        for row in list(self._decoding):
            if len(turn) == rows:
                break
            if row in self._decoding and self._make_room(row):
                turn.append(row)
        turn = [row for row in turn if row in self._decoding]  # some have given way since
        if rows < len(self._decoding):
            for row in turn:  # to the back, so that where not all rows go, all get their turn
                self._decoding[row] = self._decoding.pop(row)
        return turn

    def _make_room(self, row: Row) -> bool:
        """Whether the row has a page for its next token; if not, it has given way itself."""
        if row.cached < len(row.pages) * self._limits.page_tokens:
            return True
        while not self._pool.free:
            last = max(self._running, key=lambda live: self._queue.rank(live, self._now_ns))
            self._preempt(last)
            if last is row.live:
                return False
        row.hold(self._pool.allocate(1))
        return True

    def _preempt(self, live: Live) -> None:
        self.preemptions += 1
        for row in live.rows:
            self._prefilling.pop(row, None)
            self._decoding.pop(row, None)
            self._pool.release(row.pages)
            row.pages, row.block_table, row.cached = [], (), 0
        self._copies = [copy for copy in self._copies if copy.request_id != live.request.id]
        del self._running[live]
        self._queue.push(live)

    def _plan_prefill(
        self, budget: PowerBudget, decode_rows: int
    ) -> tuple[tuple[PrefillChunk, ...], list[Row]]:
        room = self._limits.max_tokens_per_step - decode_rows
        if budget.prefill_tokens is not None and self._prefilling:
            # Saved up until a whole chunk may go, so that the budget holds on average.
            allowed = max(1, budget.prefill_tokens)
            self._credit = min(self._credit, self._limits.prefill_chunk) + allowed
            room = min(room, self._credit)
        chunks: list[PrefillChunk] = []
        rows: list[Row] = []
        for row in self._prefilling:
            for chunk in row.chunks(self._limits.prefill_chunk):
                step_is_empty = not chunks and not decode_rows
                if len(chunk.tokens) > room and not step_is_empty:
                    return tuple(chunks), rows
                chunks.append(chunk)
                rows.append(row)
                room -= len(chunk.tokens)
                self._credit = max(0, self._credit - len(chunk.tokens))
        return tuple(chunks), rows

    def _take_outstanding(self) -> tuple[Batch, list[Row], list[Row], list[TokenEvent]]:
        """What is back, and the ends of those that were to end meanwhile."""
        assert self._outstanding is not None, "no batch is outstanding"
        batch, prefilling, decoding = self._outstanding
        self._outstanding = None
        events = [self._end(row, finish) for row, finish in self._ending.items()]
        self._ending.clear()
        return batch, prefilling, decoding, events

    def _prefilled(self, row: Row, tokens: list[SampledToken]) -> Iterator[TokenEvent]:
        """The row's prompt is in the cache: the row decodes from now on, and those that waited."""
        live, full = row.live, row.cached // self._limits.page_tokens
        rows = live.rows if live.is_fresh else [row]
        del self._prefilling[row]
        for other in rows:
            self._decoding[other] = None
            if other is row:
                continue
            own, other.pages = other.pages, []
            self._pool.share(row.pages[:full])
            other.hold(row.pages[:full] + own)
            other.cached = row.cached
            for source, target in zip(row.pages[full:], own, strict=True):
                used = row.cached - full * self._limits.page_tokens
                self._copies.append(PageCopy(live.request.id, source, target, used))
        for other, token in zip(list(rows), tokens, strict=True):
            yield self._accept(other, token)

    def _accept(self, row: Row, token: SampledToken) -> TokenEvent:
        sampling = row.live.request.sampling
        if token.id in sampling.stop_token_ids:
            return self._end(row, FinishReason.STOP)
        row.output.append(token.id)
        if len(row.output) == sampling.max_tokens:
            return self._end(row, FinishReason.LENGTH, token)
        return TokenEvent(row.live.request.id, token, None, row.index)

    def _end(
        self, row: Row, finish: FinishReason, token: SampledToken | None = None, message: str = ""
    ) -> TokenEvent:
        """The only way out of the scheduler: forget the row, free its pages, then its request."""
        live = row.live
        live.rows.remove(row)
        self._prefilling.pop(row, None)
        self._decoding.pop(row, None)
        # Targets are a row's own pages; a source may still be another row's to read.
        self._copies = [copy for copy in self._copies if copy.target not in row.pages]
        self._pool.release(row.pages)
        if not live.rows:
            del self._live[live.request.id]
            if live in self._queue:
                self._queue.remove(live)
            else:
                del self._running[live]
        is_last, request_id = not live.rows, live.request.id
        return TokenEvent(request_id, token, finish, row.index, is_last, message, live.admitted_ns)
