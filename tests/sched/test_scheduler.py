from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_rt.core import (
    Batch,
    FinishReason,
    Limits,
    PowerBudget,
    Request,
    SamplingParams,
    StepResult,
    TokenEvent,
)
from edge_rt.errors import RequestError
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner
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


def request(name: str, prompt: int = 3, max_tokens: int = 2, stop: tuple[int, ...] = ()) -> Request:
    tokens = tuple((7 * position + prompt) % 11 for position in range(prompt))
    return Request(name, tokens, SamplingParams(max_tokens, frozenset(stop)))


def execute(batch: Batch, limits: Limits) -> StepResult:
    runner = NullRunner(limits, NullOptions())
    decoded = runner.decode(batch.decode).tokens
    return StepResult(
        runner.prefill(batch.prefill).tokens, tuple(token for token in decoded if token is not None)
    )


def serving(limits: Limits, *requests: Request) -> Scheduler:
    scheduler = Scheduler(limits)
    for one in requests:
        scheduler.add(one)
    return scheduler


def step(scheduler: Scheduler, limits: Limits = PAGED) -> list[TokenEvent]:
    return scheduler.finish(execute(scheduler.schedule(0), limits), 0)


def turn(scheduler: Scheduler, limits: Limits, budget: PowerBudget) -> str:
    """Do one step and name the requests that decoded in it."""
    batch = scheduler.schedule(0, budget)
    scheduler.finish(execute(batch, limits), 0)
    return "".join(row.request_id for row in batch.decode)


def alone(one: Request, limits: Limits) -> list[TokenEvent]:
    scheduler = serving(limits, one)
    steps = range(len(one.prompt) + one.sampling.max_tokens)
    return [event for _ in steps if not scheduler.is_idle for event in step(scheduler, limits)]


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (request("a", prompt=0), "the prompt is empty"),
        (request("a", max_tokens=0), "max_tokens must be at least 1, found 0"),
        (
            request("a", prompt=30, max_tokens=5),
            "32 tokens .*: max_tokens 2 with this prompt or a prompt of 27 tokens with this max_to",
        ),
        (request("a", prompt=40), "what fits: a prompt of 30 tokens with this max_tokens"),
        (request("a", prompt=40, max_tokens=40), "what fits: a prompt of 31 tokens with max_"),
        (
            Request("a", (0, 11), SamplingParams(2)),
            "token id 11 in the prompt is not in the vocabulary, 0 to 10",
        ),
        (Request("a", (-1,), SamplingParams(2)), "token id -1"),
        (request("taken"), "request id 'taken' is in use"),
    ],
)
def test_what_can_never_be_served_is_refused_and_leaves_no_trace(
    refused: Request, message: str
) -> None:
    scheduler = serving(PAGED, request("taken"))
    with pytest.raises(RequestError, match=message):
        scheduler.add(refused)
    assert (scheduler.queued, scheduler.running) == (1, 0)


def test_a_request_that_all_pages_cannot_hold_is_refused() -> None:
    with pytest.raises(RequestError, match="more than the 20 tokens of a request"):
        Scheduler(replace(PAGED, pages=5)).add(request("a", prompt=19))


def test_the_first_token_comes_from_the_prompt_and_decodes_at_its_length() -> None:
    scheduler = serving(PAGED, request("a", prompt=3, max_tokens=3))
    (first,) = step(scheduler)
    (row,) = scheduler.schedule(0).decode
    assert (row.position, row.token, row.pages) == (3, first.token, (0, 1))


def test_length_ends_with_the_last_token() -> None:
    events = alone(request("a", max_tokens=3), PAGED)
    assert [event.finish for event in events] == [None, None, FinishReason.LENGTH]
    assert all(event.token is not None for event in events)


def test_a_stop_token_ends_without_a_token() -> None:
    free = alone(request("a", max_tokens=8), PAGED)
    token = free[4].token
    assert token is not None
    stopped = alone(request("a", max_tokens=8, stop=(token,)), PAGED)
    seen = [event.token for event in free].index(token)
    assert stopped == [*free[:seen], TokenEvent("a", None, FinishReason.STOP)]


def test_several_chunks_of_one_prompt_go_in_one_step_in_order() -> None:
    scheduler = serving(PAGED, request("a", prompt=10))
    chunks = scheduler.schedule(0).prefill
    assert [(chunk.start, len(chunk.tokens)) for chunk in chunks] == [(0, 4), (4, 4), (8, 2)]
    assert [chunk.sampling is not None for chunk in chunks] == [False, False, True]


def test_a_short_prompt_does_not_overtake_a_chunk_that_waits_for_room() -> None:
    prompts = {"a": 4, "waits": 4, "short": 1}
    limits = replace(PAGED, max_tokens_per_step=5)
    scheduler = serving(limits, *(request(name, prompt) for name, prompt in prompts.items()))
    assert [chunk.request_id for chunk in scheduler.schedule(0).prefill] == ["a"]


def test_admission_reserves_all_pages_and_keeps_the_order() -> None:
    prompts = {"large": 26, "waits": 11, "small": 1}
    scheduler = serving(PAGED, *(request(name, prompt) for name, prompt in prompts.items()))
    step(scheduler)  # "large" takes 7 pages of 10; "waits" needs 4, and "small" 1, behind it
    assert (scheduler.queued, scheduler.running) == (2, 1)
    scheduler.cancel("waits")
    step(scheduler)
    assert (scheduler.queued, scheduler.running) == (0, 2)


def test_rows_take_turns_where_not_all_may_go() -> None:
    scheduler = serving(PAGED, *(request(name, max_tokens=8) for name in "abc"))
    step(scheduler)
    turns = [turn(scheduler, PAGED, PowerBudget(max_rows=2)) for _ in range(6)]
    assert turns == ["ab", "ca", "bc"] * 2


def test_more_rows_than_tokens_in_a_step_take_turns() -> None:
    limits = replace(PAGED, prefill_chunk=2, max_tokens_per_step=2)
    scheduler = serving(limits, *(request(name, prompt=1, max_tokens=9) for name in "abc"))
    caps = (None, 1, None, None, None)  # the second lets "c" in while "b" waits for its turn
    turns = [turn(scheduler, limits, PowerBudget(max_rows=cap)) for cap in caps]
    assert turns == ["", "a", "ba", "cb", "ac"]


def test_the_smallest_budget_still_moves_one_chunk_then_one_row() -> None:
    scheduler = serving(PAGED, request("a", prompt=6), request("b", prompt=6))
    for expected in ((1, 0), (1, 0), (0, 1)):
        batch = scheduler.schedule(0, TIGHTEST)
        assert (len(batch.prefill), len(batch.decode)) == expected
        scheduler.finish(execute(batch, PAGED), 0)


def long_request_after(steps: int) -> Scheduler:
    """One request that is queued (0 steps), in prefill (1) or decoding (2)."""
    scheduler = serving(replace(PAGED, max_tokens_per_step=4), request("a", prompt=6, max_tokens=8))
    for _ in range(steps):
        step(scheduler)
    return scheduler


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancel_between_steps_ends_at_once_and_frees_the_id(steps: int) -> None:
    scheduler = long_request_after(steps)
    assert scheduler.cancel("a") == TokenEvent("a", None, FinishReason.CANCELLED)
    assert scheduler.cancel("a") is None
    scheduler.check_integrity()
    assert scheduler.is_idle
    scheduler.add(request("a"))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancel_while_its_batch_is_out_ends_when_it_is_back(steps: int, fails: bool) -> None:
    scheduler = long_request_after(steps)
    batch = scheduler.schedule(0)
    assert scheduler.cancel("a") is None
    assert scheduler.cancel("a") is None
    back = scheduler.fail("x", 0) if fails else scheduler.finish(execute(batch, PAGED), 0)
    assert back == [TokenEvent("a", None, FinishReason.CANCELLED)]
    scheduler.check_integrity()
    assert scheduler.is_idle


def test_a_failure_ends_the_requests_of_the_batch_only() -> None:
    scheduler = serving(SLOTS, *(request(name) for name in "abcd"))
    scheduler.schedule(0)
    ended = scheduler.fail("out of memory", 0)
    assert ended == [TokenEvent(i, None, FinishReason.ERROR, "out of memory") for i in "abc"]
    assert scheduler.queued == 1
    assert [event.request_id for event in step(scheduler, SLOTS)] == ["d"]


def test_cancel_all_ends_every_stage_and_forgets_the_batch() -> None:
    scheduler = serving(
        replace(SLOTS, max_requests=2, max_tokens_per_step=4),
        *(request(name, prompt=4, max_tokens=4) for name in "abc"),
    )
    step(scheduler)
    scheduler.schedule(0)
    ended = scheduler.cancel_all()
    assert ended == [TokenEvent(name, None, FinishReason.CANCELLED) for name in "abc"]
    scheduler.check_integrity()
    assert scheduler.schedule(0) == Batch()


def test_only_one_batch_is_out_and_time_does_not_run_back() -> None:
    scheduler = Scheduler(PAGED)
    with pytest.raises(AssertionError, match="no batch is outstanding"):
        scheduler.finish(StepResult(), 5)
    with pytest.raises(AssertionError, match="the clock ran back from 5 to 4 ns"):
        scheduler.schedule(4)
    scheduler.add(request("a"))
    scheduler.schedule(5)
    with pytest.raises(AssertionError, match="neither finished nor failed"):
        scheduler.schedule(5)


@dataclass
class Watched:
    """What the outside world has seen of one accepted request."""

    request: Request
    number: int
    events: list[TokenEvent] = field(default_factory=list)
    prefilled: int = 0

    @property
    def is_live(self) -> bool:
        return not self.events or self.events[-1].finish is None


class AnyTraffic(RuleBasedStateMachine):
    """Arrivals, cancellations, failures and power budgets in any order, over the null engine."""

    @initialize(
        limits=st.builds(
            replace,
            st.sampled_from([PAGED, SLOTS]),
            max_tokens_per_step=st.integers(4, 12),
            max_requests=st.integers(1, 4),
            max_rows=st.integers(1, 4),
        )
    )
    def start(self, limits: Limits) -> None:
        self.limits = limits
        self.scheduler = Scheduler(self.limits)
        self.watched: dict[str, Watched] = {}
        self.batch: Batch | None = None
        self.cancelled_while_out: set[str] = set()
        self.newest_admitted = -1

    @rule(
        prompt=st.lists(st.integers(0, 10), min_size=1, max_size=14),
        max_tokens=st.integers(1, 12),
        stop=st.frozensets(st.integers(0, 10), max_size=2),
    )
    def submit(self, prompt: list[int], max_tokens: int, stop: frozenset[int]) -> None:
        number = len(self.watched)
        one = Request(f"r{number}", tuple(prompt), SamplingParams(max_tokens, stop))
        self.scheduler.add(one)
        self.watched[one.id] = Watched(one, number)

    @rule(number=st.integers(0, 20))
    def cancel(self, number: int) -> None:
        name = f"r{number % (len(self.watched) + 1)}"  # one of them never was
        is_live = name in self.watched and self.watched[name].is_live
        batch = self.batch or Batch()
        out = [one.request_id for one in batch.prefill] + [row.request_id for row in batch.decode]
        event = self.scheduler.cancel(name)
        assert (event is not None) == (is_live and name not in out)
        self.see([event] if event else [])
        self.cancelled_while_out.update({name} & {*out})

    @precondition(lambda self: self.batch is None)
    @rule(budget=BUDGETS)
    def schedule(self, budget: PowerBudget) -> None:
        batch = self.scheduler.schedule(0, budget)
        self.batch = batch if batch.tokens else None
        self.check_progress(batch)
        self.check_limits(batch)
        self.check_budget(batch, budget)
        self.check_no_row_is_left_out(batch, budget)
        self.check_chunks(batch)

    @precondition(lambda self: self.batch is not None)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def come_back(self, fails: bool) -> None:
        assert self.batch is not None
        if fails:
            events = self.scheduler.fail("injected", 0)
        else:
            events = self.scheduler.finish(execute(self.batch, self.limits), 0)
        self.batch = None
        self.see(events)
        for name in self.cancelled_while_out:
            assert self.watched[name].events[-1].finish is FinishReason.CANCELLED
        self.cancelled_while_out.clear()

    def see(self, events: list[TokenEvent]) -> None:
        for event in events:
            one = self.watched[event.request_id]
            assert one.is_live, f"{event} comes after the end"
            one.events.append(event)

    def check_progress(self, batch: Batch) -> None:
        assert bool(batch.tokens) == any(one.is_live for one in self.watched.values())

    def check_limits(self, batch: Batch) -> None:
        assert batch.tokens <= self.limits.max_tokens_per_step
        assert self.scheduler.running <= min(self.limits.max_requests, self.limits.max_rows)
        prefilling = {chunk.request_id for chunk in batch.prefill}
        assert not prefilling & {row.request_id for row in batch.decode}

    def check_budget(self, batch: Batch, budget: PowerBudget) -> None:
        if budget.max_rows is not None:
            assert len(batch.decode) <= max(1, budget.max_rows)
        if budget.prefill_tokens is not None and len(batch.prefill) + len(batch.decode) > 1:
            assert batch.tokens - len(batch.decode) <= budget.prefill_tokens

    def check_no_row_is_left_out(self, batch: Batch, budget: PowerBudget) -> None:
        decoding = sum(bool(one.events) and one.is_live for one in self.watched.values())
        allowed = self.limits.max_rows if budget.max_rows is None else max(1, budget.max_rows)
        assert len(batch.decode) == min(decoding, allowed, self.limits.max_tokens_per_step)

    def check_chunks(self, batch: Batch) -> None:
        for chunk in batch.prefill:
            one = self.watched[chunk.request_id]
            if one.prefilled == 0:
                assert one.number > self.newest_admitted, "admission is not first come first served"
                self.newest_admitted = one.number
            end = min(one.prefilled + self.limits.prefill_chunk, len(one.request.prompt))
            assert chunk.start == one.prefilled
            assert chunk.tokens == one.request.prompt[chunk.start : end]
            one.prefilled = end

    @invariant()
    def no_page_is_lost_or_shared(self) -> None:
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.batch is not None:
            self.come_back(fails=False)
        self.check_it_comes_to_rest()
        self.check_every_request_ends_once()
        self.check_tokens_are_those_of_the_request_alone()

    def check_it_comes_to_rest(self) -> None:
        live = [one.request for one in self.watched.values() if one.is_live]
        for _ in range(sum(len(one.prompt) + one.sampling.max_tokens for one in live)):
            self.schedule(TIGHTEST)
            if self.batch is not None:
                self.come_back(fails=False)
        assert self.scheduler.is_idle
        self.scheduler.check_integrity()

    def check_every_request_ends_once(self) -> None:
        for one in self.watched.values():
            ends = [event.finish is not None for event in one.events]
            assert ends == [False] * (len(ends) - 1) + [True]

    def check_tokens_are_those_of_the_request_alone(self) -> None:
        for one in self.watched.values():
            expected = alone(one.request, self.limits)
            if one.events[-1].finish in (FinishReason.CANCELLED, FinishReason.ERROR):
                assert one.events[:-1] == expected[: len(one.events) - 1]
            else:
                assert one.events == expected


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
