"""Any traffic over the null engine, and what must hold whatever comes, by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from fakes.strict import StrictRunner
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_rt.core import (
    Batch,
    FinishReason,
    Limits,
    PowerBudget,
    Priority,
    Request,
    SamplingParams,
    StepResult,
    TokenEvent,
)
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner
from edge_rt.sched.queue import SchedulerOptions
from edge_rt.sched.scheduler import Scheduler

PAGED = Limits(
    max_requests=4,
    max_rows=4,
    max_tokens_per_step=12,
    prefill_chunk=4,
    pages=10,
    page_tokens=4,
    max_context=32,
    vocab_size=11,
)
SLOTS = replace(PAGED, max_requests=3, max_rows=3, pages=3, page_tokens=32)
TIGHTEST = PowerBudget(max_rows=0, prefill_tokens=0)
BUDGETS = st.builds(PowerBudget, st.none() | st.integers(0, 4), st.none() | st.integers(0, 12))
AGEING_MS, WINDOW_MS = 1.0, 0.1
CUT_SHORT = (FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.TIMEOUT)


def request(
    name: str, prompt: int = 3, max_tokens: int = 2, stop: tuple[int, ...] = (), **rest: Any
) -> Request:
    tokens = tuple((7 * position + prompt) % 11 for position in range(prompt))
    return Request(name, tokens, SamplingParams(max_tokens, frozenset(stop)), **rest)


def execute(batch: Batch, runner: StrictRunner) -> StepResult:
    if batch.copies:
        runner.copy(batch.copies)
    prefilled = runner.prefill(batch.prefill).tokens if batch.prefill else ()
    return StepResult(prefilled, runner.decode(batch.decode).tokens if batch.decode else ())


def strict(limits: Limits) -> StrictRunner:
    return StrictRunner(NullRunner(limits, NullOptions()))


def alone(one: Request, limits: Limits) -> list[TokenEvent]:
    """The events of a request that has the engine for itself, without its deadline."""
    scheduler, runner = Scheduler(limits), strict(limits)
    scheduler.add(replace(one, deadline_ns=None), 0)
    events: list[TokenEvent] = []
    while not scheduler.is_idle:
        events += scheduler.finish(execute(scheduler.schedule(0), runner), 0)
    return events


def _of_row_alone(event: TokenEvent) -> TokenEvent:
    """Without what other rows and requests decide."""
    return event._replace(is_last=False, admitted_ns=None)


@dataclass
class Watched:
    """What the outside world has seen of one accepted request."""

    request: Request
    arrived_ns: int
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def is_live(self) -> bool:
        return not any(event.is_last for event in self.events)

    def of_row(self, row: int) -> list[TokenEvent]:
        return [event for event in self.events if event.row == row]

    def live_rows(self) -> list[int]:
        ended = {event.row for event in self.events if event.finish}
        return [row for row in range(self.request.rows) if row not in ended]


class AnyTraffic(RuleBasedStateMachine):
    """Arrivals, cancellations, deadlines, failures and power budgets in any order."""

    scheduler_class = Scheduler

    @initialize(
        limits=st.builds(
            replace,
            st.sampled_from([PAGED, replace(PAGED, pages=4), replace(PAGED, pages=6), SLOTS]),
            max_tokens_per_step=st.integers(4, 12),
            max_requests=st.integers(1, 4),
            max_rows=st.integers(1, 4),
        ),
        window=st.sampled_from([0.0, WINDOW_MS]),
    )
    def start(self, limits: Limits, window: float) -> None:
        self.limits = limits
        self.scheduler = self.scheduler_class(limits, SchedulerOptions(AGEING_MS, window))
        self.window_ns = int(window * 1e6)
        self.runner = strict(limits)
        self.watched: dict[str, Watched] = {}
        self.batch: Batch | None = None
        self.now_ns = 0
        self.saved = 0  # prefill tokens that budgets allowed and that did not go

    @rule(
        prompt=st.lists(st.integers(0, 10), min_size=1, max_size=14),
        max_tokens=st.integers(1, 12),
        stop=st.frozensets(st.integers(0, 10), max_size=2),
        rows=st.sampled_from([1, 1, 2, 3]),
        priority=st.sampled_from(Priority),
        deadline_ns=st.none() | st.integers(0, 3_000_000),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        stop: frozenset[int],
        rows: int,
        priority: Priority,
        deadline_ns: int | None,
    ) -> None:
        most = min(self.limits.max_rows, self.limits.pages)
        fits = self.limits.page_tokens * (self.limits.pages // min(rows, most))
        max_tokens = min(max_tokens, fits - 1)
        prompt = prompt[: fits - max_tokens]
        one = Request(
            f"r{len(self.watched)}",
            tuple(prompt),
            SamplingParams(max_tokens, stop),
            rows=min(rows, most),
            priority=priority,
            deadline_ns=None if deadline_ns is None else self.now_ns + deadline_ns,
        )
        self.scheduler.add(one, self.now_ns)
        self.watched[one.id] = Watched(one, self.now_ns)

    @rule(number=st.integers(0, 20), row=st.none() | st.integers(0, 2))
    def cancel(self, number: int, row: int | None) -> None:
        name = f"r{number % (len(self.watched) + 1)}"  # one of them never was
        self.see(self.scheduler.cancel(name, row))

    @rule(passed_ns=st.sampled_from([1_000, 100_000, 1_500_000]))
    def wait(self, passed_ns: int) -> None:
        self.now_ns += passed_ns

    @precondition(lambda self: self.batch is None)
    @rule(budget=BUDGETS)
    def schedule(self, budget: PowerBudget) -> None:
        self.see(self.scheduler.expire(self.now_ns))
        for one in self.watched.values():
            if one.is_live and one.request.deadline_ns is not None:
                assert one.request.deadline_ns > self.now_ns, "a deadline passed unseen"
        waiting = self.queued()
        batch = self.scheduler.schedule(self.now_ns, budget)
        self.check_admission_is_in_order(waiting)
        self.batch = batch if batch.tokens else None
        self.check_something_moves(batch)
        self.check_limits(batch)
        self.check_budget(batch, budget)

    @precondition(lambda self: self.batch is not None)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def come_back(self, fails: bool) -> None:
        assert self.batch is not None
        result = execute(self.batch, self.runner)
        self.batch = None
        if fails:
            self.see(self.scheduler.fail("injected", self.now_ns))
        else:
            self.see(self.scheduler.finish(result, self.now_ns))

    def see(self, events: list[TokenEvent]) -> None:
        for event in events:
            one = self.watched[event.request_id]
            assert one.is_live, f"{event} comes after the request's end"
            assert event.row in one.live_rows(), f"{event} comes after the row's end"
            one.events.append(event)
            assert event.is_last == (not one.live_rows())

    def check_something_moves(self, batch: Batch) -> None:
        live = [one for one in self.watched.values() if one.is_live]
        if batch.tokens or not live:
            assert bool(batch.tokens) == bool(live)
            return
        wake_ns = self.scheduler.wake_ns
        assert wake_ns is not None
        assert self.now_ns < wake_ns <= self.now_ns + self.window_ns, "live, but none can move"

    def queued(self) -> set[str]:
        return {live.request.id for live in self.scheduler._queue._waiting}

    def check_admission_is_in_order(self, waiting: set[str]) -> None:
        """Interactive and aged requests first, then as they came; nobody is overtaken."""

        def place(name: str) -> tuple[bool, int]:
            one = self.watched[name]
            aged = self.now_ns - one.arrived_ns >= AGEING_MS * 1e6
            return one.request.priority is Priority.BATCH and not aged, int(name[1:])

        left = self.queued()
        for name in waiting - left:
            assert all(place(name) < place(other) for other in left & waiting), name

    def check_limits(self, batch: Batch) -> None:
        assert batch.tokens <= self.limits.max_tokens_per_step
        assert self.scheduler.running <= self.limits.max_requests
        assert self.scheduler.running_rows <= self.limits.max_rows
        prefilling = {chunk.pages for chunk in batch.prefill}
        assert not prefilling & {row.pages for row in batch.decode}

    def check_budget(self, batch: Batch, budget: PowerBudget) -> None:
        if budget.max_rows is not None:
            assert len(batch.decode) <= max(1, budget.max_rows)
        if budget.prefill_tokens is None:
            return
        # What steps before did not use is saved up, up to a chunk.
        most = max(1, budget.prefill_tokens) + self.limits.prefill_chunk
        assert len(batch.prefill) <= 1 or batch.tokens - len(batch.decode) <= most

    @invariant()
    def no_page_is_lost_or_shared_without_count(self) -> None:
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.batch is not None:
            self.come_back(fails=False)
        self.check_nothing_starves()
        self.check_every_request_ends_once()
        self.check_tokens_are_those_of_the_request_alone()

    def check_nothing_starves(self) -> None:
        """All come to an end in as many steps as their tokens took one by one, twice over."""
        live = [one.request for one in self.watched.values() if one.is_live]
        tokens = sum(one.rows * (len(one.prompt) + one.sampling.max_tokens) for one in live)
        for _ in range(8 * tokens):
            if self.scheduler.is_idle:
                break
            self.now_ns += self.window_ns
            self.schedule(TIGHTEST)
            if self.batch is not None:
                self.come_back(fails=False)
        assert self.scheduler.is_idle
        self.scheduler.check_integrity()
        assert self.scheduler.pages_in_use == 0

    def check_every_request_ends_once(self) -> None:
        for one in self.watched.values():
            assert Counter(event.row for event in one.events if event.finish) == Counter(
                range(one.request.rows)
            )
            assert [event.is_last for event in one.events].count(True) == 1

    def check_tokens_are_those_of_the_request_alone(self) -> None:
        for one in self.watched.values():
            expected = alone(one.request, self.limits)
            for row in range(one.request.rows):
                found = [_of_row_alone(event) for event in one.of_row(row)]
                wanted = [_of_row_alone(event) for event in expected if event.row == row]
                if found[-1].finish in CUT_SHORT:
                    assert found[:-1] == wanted[: len(found) - 1]
                else:
                    assert found == wanted
