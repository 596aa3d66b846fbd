"""One rule of the scheduler at a time; whatever comes in any order is test_traffic's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.strict import StrictRunner
from fakes.traffic import PAGED, SLOTS, TIGHTEST, alone, execute, request, strict

from edge_rt.core import (
    Batch,
    FinishReason,
    Limits,
    PowerBudget,
    Priority,
    Request,
    SampledToken,
    StepResult,
    TokenEvent,
)
from edge_rt.sched.queue import SchedulerOptions
from edge_rt.sched.scheduler import Scheduler

NO_CAP = PowerBudget()
DEFAULT = SchedulerOptions()


class Bench:
    """A scheduler and its strict null engine, stepped by hand."""

    def __init__(
        self, limits: Limits, *requests: Request, options: SchedulerOptions = DEFAULT
    ) -> None:
        self.scheduler = Scheduler(limits, options)
        self.runner: StrictRunner = strict(limits)
        self.now_ns = 0
        for one in requests:
            self.scheduler.add(one, 0)

    def schedule(self, budget: PowerBudget = NO_CAP) -> Batch:
        return self.scheduler.schedule(self.now_ns, budget)

    def finish(self, batch: Batch) -> list[TokenEvent]:
        return self.scheduler.finish(execute(batch, self.runner), self.now_ns)

    def step(self, budget: PowerBudget = NO_CAP) -> list[TokenEvent]:
        return self.finish(self.schedule(budget))

    def turn(self, budget: PowerBudget = NO_CAP) -> str:
        """Do one step and name the requests that decoded in it."""
        batch = self.schedule(budget)
        self.finish(batch)
        return "".join(row.request_id for row in batch.decode)

    def rest(self) -> list[TokenEvent]:
        """The events until all have ended."""
        events: list[TokenEvent] = []
        while not self.scheduler.is_idle:
            events += self.step()
        self.scheduler.check_integrity()
        return events


def test_the_first_token_comes_from_the_prompt_and_decodes_at_its_length() -> None:
    bench = Bench(PAGED, request("a", prompt=3, max_tokens=3))
    (first,) = bench.step()
    (row,) = bench.schedule().decode
    assert first.token is not None
    assert (row.position, row.token, row.pages) == (3, first.token.id, (0,))


def test_length_ends_with_the_last_token() -> None:
    events = alone(request("a", max_tokens=3), PAGED)
    assert [event.finish for event in events] == [None, None, FinishReason.LENGTH]
    assert [event.is_last for event in events] == [False, False, True]
    assert all(event.token is not None for event in events)


def test_a_stop_token_ends_without_a_token() -> None:
    free = alone(request("a", max_tokens=8), PAGED)
    ids = [event.token.id for event in free if event.token]
    stopped = alone(request("a", max_tokens=8, stop=(ids[4],)), PAGED)
    seen = ids.index(ids[4])
    assert stopped == [
        *free[:seen],
        TokenEvent("a", None, FinishReason.STOP, is_last=True, admitted_ns=0),
    ]


def test_several_chunks_of_one_prompt_go_in_one_step_in_order() -> None:
    chunks = Bench(PAGED, request("a", prompt=10)).schedule().prefill
    assert [(chunk.start, len(chunk.tokens)) for chunk in chunks] == [(0, 4), (4, 4), (8, 2)]
    assert [len(chunk.draws) for chunk in chunks] == [0, 0, 1]


def test_a_short_prompt_does_not_overtake_a_chunk_that_waits_for_room() -> None:
    prompts = {"a": 4, "waits": 4, "short": 1}
    limits = replace(PAGED, max_tokens_per_step=5)
    bench = Bench(limits, *(request(name, prompt) for name, prompt in prompts.items()))
    assert [chunk.request_id for chunk in bench.schedule().prefill] == ["a"]


def test_a_small_request_does_not_overtake_one_that_waits_for_pages() -> None:
    prompts = {"large": 24, "waits": 16, "small": 1}
    bench = Bench(PAGED, *(request(name, prompt) for name, prompt in prompts.items()))
    bench.step()  # "waits" needs 4 pages and 4 are free, but "large" comes to need one of them
    assert (bench.scheduler.queued, bench.scheduler.running) == (2, 1)
    bench.scheduler.cancel("waits")
    bench.step()
    assert (bench.scheduler.queued, bench.scheduler.running) == (0, 2)


def test_rows_take_turns_where_not_all_may_go() -> None:
    bench = Bench(PAGED, *(request(name, max_tokens=8) for name in "abc"))
    bench.step()
    turns = [bench.turn(PowerBudget(max_rows=2)) for _ in range(6)]
    assert turns == ["ab", "ca", "bc"] * 2


def test_more_rows_than_tokens_in_a_step_take_turns() -> None:
    limits = replace(PAGED, prefill_chunk=2, max_tokens_per_step=2)
    bench = Bench(limits, *(request(name, prompt=1, max_tokens=9) for name in "abc"))
    caps = (None, 1, None, None, None)  # the second lets "c" in while "b" waits for its turn
    turns = [bench.turn(PowerBudget(max_rows=cap)) for cap in caps]
    assert turns == ["", "a", "ba", "cb", "ac"]


def test_the_smallest_budget_still_moves_one_chunk_then_one_row() -> None:
    bench = Bench(PAGED, request("a", prompt=6), request("b", prompt=6))
    moved = []
    for _ in range(3):
        batch = bench.schedule(TIGHTEST)
        moved.append((len(batch.prefill), len(batch.decode)))
        bench.finish(batch)
    assert moved == [(1, 0), (1, 0), (0, 1)]


def test_a_budget_smaller_than_a_chunk_is_saved_up_while_others_decode() -> None:
    """3 tokens a step let chunks of 4 go in three of four steps, on average."""
    bench = Bench(PAGED, request("a", prompt=1, max_tokens=20))
    bench.step()
    bench.scheduler.add(request("b", prompt=12, max_tokens=1), 0)
    budget, prefilled = PowerBudget(prefill_tokens=3), []
    for _ in range(8):
        batch = bench.schedule(budget)
        prefilled.append(sum(len(chunk.tokens) for chunk in batch.prefill))
        bench.finish(batch)
    assert prefilled == [0, 4, 4, 4, 0, 0, 0, 0]


def long_request_after(steps: int) -> Bench:
    """One request that is queued (0 steps), in prefill (1) or decoding (2)."""
    bench = Bench(replace(PAGED, max_tokens_per_step=4), request("a", prompt=6, max_tokens=8))
    for _ in range(steps):
        bench.step()
    return bench


def end(finish: FinishReason, steps: int) -> TokenEvent:
    """Of a request that was admitted in the first of `steps`, without waiting."""
    return TokenEvent("a", None, finish, is_last=True, admitted_ns=0 if steps else None)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancel_between_steps_ends_at_once_and_frees_the_id(steps: int) -> None:
    scheduler = long_request_after(steps).scheduler
    assert scheduler.cancel("a") == [end(FinishReason.CANCELLED, steps)]
    assert scheduler.cancel("a") == []
    scheduler.check_integrity()
    assert scheduler.is_idle
    scheduler.add(request("a"), 0)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancel_while_its_batch_is_out_ends_when_it_is_back(steps: int, fails: bool) -> None:
    bench = long_request_after(steps)
    batch = bench.schedule()
    assert bench.scheduler.cancel("a") == []
    assert bench.scheduler.cancel("a") == []
    back = bench.scheduler.fail("x", 0) if fails else bench.finish(batch)
    assert back == [end(FinishReason.CANCELLED, steps + 1)]
    bench.scheduler.check_integrity()
    assert bench.scheduler.is_idle


def test_a_reader_may_end_a_row_for_its_own_reason() -> None:
    """A stop string is text, which only the reader sees."""
    bench = Bench(PAGED, request("a", max_tokens=8, rows=2))
    bench.step()
    first = bench.scheduler.cancel("a", 0, FinishReason.STOP)
    assert first == [TokenEvent("a", None, FinishReason.STOP, 0, admitted_ns=0)]
    assert bench.turn() == "a"
    second = bench.scheduler.cancel("a", 1, FinishReason.STOP)
    assert second == [TokenEvent("a", None, FinishReason.STOP, 1, is_last=True, admitted_ns=0)]
    assert bench.scheduler.is_idle


def test_a_failure_ends_the_requests_of_the_batch_only() -> None:
    bench = Bench(SLOTS, *(request(name) for name in "abcd"))
    bench.schedule()
    ended = bench.scheduler.fail("out of memory", 0)
    expected = [TokenEvent(i, None, FinishReason.ERROR, 0, True, "out of memory", 0) for i in "abc"]
    assert ended == expected
    assert bench.scheduler.queued == 1
    assert [event.request_id for event in bench.step()] == ["d"]


def test_a_failure_ends_a_request_whose_copies_were_lost() -> None:
    """Its second row has no cache, though neither row decoded in that step."""
    bench = Bench(SLOTS, request("b", max_tokens=9), request("a", max_tokens=9, rows=2))
    bench.step()
    batch = bench.schedule(PowerBudget(max_rows=1))
    assert [row.request_id for row in batch.decode] == ["b"]
    assert batch.copies
    ended = bench.scheduler.fail("x", 0)
    assert sorted({event.request_id for event in ended}) == ["a", "b"]
    assert bench.scheduler.is_idle


def test_rows_that_end_with_their_first_token_are_not_copied() -> None:
    """Their copies would be made in another request's step, and fail with it."""
    limits = replace(SLOTS, max_requests=1)
    bench = Bench(limits, request("a", max_tokens=1, rows=2), request("b", max_tokens=4))
    assert [event.finish for event in bench.step()] == [FinishReason.LENGTH] * 2
    batch = bench.schedule()
    assert [chunk.request_id for chunk in batch.prefill] == ["b"]
    assert batch.copies == ()


def test_a_row_that_lives_on_is_copied_from_one_that_ended() -> None:
    bench = Bench(SLOTS, request("a", max_tokens=3, rows=2))
    bench.step()
    assert bench.scheduler.cancel("a", 0) == [
        end(FinishReason.CANCELLED, 1)._replace(is_last=False)
    ]
    ((copy,), (row,)) = (batch := bench.schedule()).copies, batch.decode
    assert copy.target in row.pages
    bench.finish(batch)
    assert bench.rest()[-1].finish is FinishReason.LENGTH


def test_cancel_all_ends_every_stage_and_forgets_the_batch() -> None:
    limits = replace(SLOTS, max_requests=2, max_tokens_per_step=4)
    bench = Bench(limits, *(request(name, prompt=4, max_tokens=4) for name in "abc"))
    bench.step()
    bench.schedule()
    ended = bench.scheduler.cancel_all()
    waits = {"a": 1, "b": 1, "c": 0}  # c was never let in
    assert ended == [
        end(FinishReason.CANCELLED, steps)._replace(request_id=name)
        for name, steps in waits.items()
    ]
    bench.scheduler.check_integrity()
    assert bench.schedule() == Batch()


def test_continuations_share_the_prompts_full_pages_and_copy_the_last() -> None:
    bench = Bench(PAGED, request("a", prompt=6, max_tokens=4, rows=3))
    first = bench.step()
    assert [event.row for event in first] == [0, 1, 2]
    assert len({event.token.id for event in first if event.token}) > 1, "each draws for itself"
    batch = bench.schedule()
    tables = [row.pages for row in batch.decode]
    assert {table[0] for table in tables} == {tables[0][0]}
    assert len({table[1] for table in tables}) == 3
    copied = [(copy.source, copy.target, copy.tokens) for copy in batch.copies]
    assert copied == [(tables[0][1], table[1], 2) for table in tables[1:]]
    bench.finish(batch)
    assert bench.scheduler.pages_in_use == 4
    bench.rest()
    assert bench.scheduler.pages_in_use == 0


def test_the_last_in_gives_way_when_pages_run_out_and_loses_nothing() -> None:
    limits = replace(PAGED, pages=4)
    requests = [request(name, prompt=4, max_tokens=12) for name in "ab"]
    bench = Bench(limits, *requests)
    preempted, events = False, []
    while not bench.scheduler.is_idle:
        events += bench.step()
        preempted |= bench.scheduler.queued == 1
    assert preempted
    for one in requests:
        assert [e for e in events if e.request_id == one.id] == alone(one, limits)
    ends = [event.request_id for event in events if event.is_last]
    assert ends == ["a", "b"], "the first in never waits for the last"


def test_a_batch_request_gives_way_to_an_interactive_one_that_came_later() -> None:
    limits = replace(PAGED, pages=4)
    slow = request("slow", prompt=4, max_tokens=12, priority=Priority.BATCH)
    bench = Bench(limits, slow, request("fast", prompt=4, max_tokens=12))
    ends = [event.request_id for event in bench.rest() if event.is_last]
    assert ends == ["fast", "slow"]


def admitted(bench: Bench) -> list[str]:
    return [chunk.request_id for chunk in bench.schedule().prefill]


def test_interactive_requests_go_first_until_a_batch_request_has_aged() -> None:
    limits = replace(SLOTS, max_requests=1)
    requests = [request("b", priority=Priority.BATCH), request("i")]
    assert admitted(Bench(limits, *requests)) == ["i"]
    aged = Bench(limits, *requests, options=SchedulerOptions(ageing_ms=5))
    aged.now_ns = 4_999_999
    assert admitted(aged) == ["i"]
    aged = Bench(limits, *requests, options=SchedulerOptions(ageing_ms=5))
    aged.now_ns = 5_000_000
    assert admitted(aged) == ["b"]


def test_a_stream_of_interactive_requests_does_not_starve_a_batch_request() -> None:
    options = SchedulerOptions(ageing_ms=1)
    bench = Bench(replace(SLOTS, max_requests=1), options=options)
    bench.scheduler.add(request("b", priority=Priority.BATCH), 0)
    seen: list[TokenEvent] = []
    for number in range(30):
        bench.now_ns += 100_000
        bench.scheduler.add(request(f"i{number}"), bench.now_ns)
        seen += bench.step()
    assert any(event.request_id == "b" for event in seen)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_deadline_ends_a_request_in_any_stage(steps: int) -> None:
    bench = Bench(replace(PAGED, max_tokens_per_step=4))
    bench.scheduler.add(request("a", prompt=6, max_tokens=8, deadline_ns=100), 0)
    bench.scheduler.add(request("b", deadline_ns=101), 0)
    for _ in range(steps):
        bench.step()
    assert bench.scheduler.expire(99) == []
    assert bench.scheduler.expire(100) == [end(FinishReason.TIMEOUT, steps)]
    assert bench.scheduler.expire(100) == []
    bench.scheduler.check_integrity()


def test_an_id_used_again_does_not_inherit_a_deadline() -> None:
    bench = Bench(PAGED, request("a", deadline_ns=100))
    bench.scheduler.cancel("a")
    bench.scheduler.add(request("a"), 50)
    assert bench.scheduler.expire(200) == []


def test_an_idle_engine_waits_a_window_for_company() -> None:
    options = SchedulerOptions(batching_window_ms=1)
    bench = Bench(SLOTS, request("a", max_tokens=3), options=options)
    assert bench.schedule() == Batch()
    assert bench.scheduler.wake_ns == 1_000_000
    bench.now_ns = 500_000
    bench.scheduler.add(request("b"), bench.now_ns)
    assert bench.schedule() == Batch()
    bench.now_ns = 1_000_000
    assert admitted(bench) == ["a", "b"]


def test_the_window_does_not_hold_a_full_batch_or_a_running_engine() -> None:
    options = SchedulerOptions(batching_window_ms=1)
    full = Bench(SLOTS, *(request(name) for name in "abc"), options=options)
    assert admitted(full) == ["a", "b", "c"]
    running = Bench(SLOTS, request("a", max_tokens=9), options=options)
    running.now_ns = 1_000_000
    running.step()
    running.scheduler.add(request("b"), running.now_ns)
    assert admitted(running) == ["b"]


def test_only_one_batch_is_out_and_time_does_not_run_back() -> None:
    scheduler = Scheduler(PAGED)
    with pytest.raises(AssertionError, match="no batch is outstanding"):
        scheduler.finish(StepResult(), 5)
    with pytest.raises(AssertionError, match="the clock ran back from 5 to 4 ns"):
        scheduler.schedule(4)
    scheduler.add(request("a"), 5)
    scheduler.schedule(5)
    with pytest.raises(AssertionError, match="neither finished nor failed"):
        scheduler.schedule(5)


def test_a_result_with_too_many_tokens_is_no_result() -> None:
    bench = Bench(PAGED, request("a"))
    bench.schedule()
    with pytest.raises(AssertionError, match="more tokens than draws"):
        bench.scheduler.finish(StepResult((SampledToken(1), SampledToken(2)), ()), 0)


def test_a_batching_window_does_not_outlast_a_deadline() -> None:
    """Who sleeps until `wake_ns` must be there to end a request whose time is up."""
    scheduler = Scheduler(PAGED, SchedulerOptions(batching_window_ms=1000))
    scheduler.add(replace(request("a"), deadline_ns=5_000), 0)
    assert scheduler.schedule(0) == Batch()
    assert scheduler.wake_ns == 5_000
    assert [event.finish for event in scheduler.expire(5_000)] == [FinishReason.TIMEOUT]
    assert scheduler.wake_ns is None
