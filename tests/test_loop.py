from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fakes.loops import LIMITS, Reader, Script, request
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.core import (
    FinishReason,
    PowerBudget,
    PrefillChunk,
    Request,
    SampledToken,
    SamplingParams,
    TokenEvent,
)
from edge_rt.errors import EngineError, RequestError
from edge_rt.loop import Loop
from edge_rt.recipes import NullOptions
from edge_rt.runtime.base import Sampled
from edge_rt.runtime.null import NullRunner
from edge_rt.sched.scheduler import Scheduler


def test_a_request_runs_from_prompt_to_its_end() -> None:
    loop, reader = Loop(Script()), Reader()
    loop.submit(request("a", prompt=6, max_tokens=3), reader)
    stats = [loop.step() for _ in range(4)]
    counts = [(one.prefill_tokens, one.decode_rows) for one in stats if one]
    assert counts == [(6, 0), (0, 1), (0, 1)]
    assert stats[3] is None
    assert [event.finish for event in reader.events["a"]] == [None, None, FinishReason.LENGTH]


def test_a_step_times_both_halves() -> None:
    loop, reader = Loop(NullRunner(LIMITS, NullOptions(step_ms=2))), Reader()
    loop.submit(request("a"), reader)
    loop.step()
    loop.submit(request("b"), reader)
    mixed = loop.step()
    assert mixed is not None
    assert min(mixed.prefill_ns, mixed.decode_ns) >= 2_000_000
    assert mixed.started_ns > 0


def test_an_empty_loop_has_nothing_to_do() -> None:
    loop = Loop(Script())
    assert loop.step() is None
    loop.run_until_idle()


def test_a_request_that_can_never_be_served_is_refused_to_its_caller() -> None:
    loop, reader = Loop(Script()), Reader()
    with pytest.raises(RequestError, match="what fits"):
        loop.submit(request("a", prompt=32), reader)
    loop.run_until_idle()
    assert not reader.events


def test_a_taken_id_is_an_error_event_and_leaves_its_owner_alone() -> None:
    loop, owner, second = Loop(Script()), Reader(), Reader()
    loop.submit(request("a"), owner)
    loop.submit(request("a"), second)
    loop.run_until_idle()
    (refusal,) = second.events["a"]
    assert refusal.finish is FinishReason.ERROR
    assert "request id 'a' is in use" in refusal.message
    assert owner.ends() == {"a": [FinishReason.LENGTH]}


def test_cancel_ends_a_request_before_the_next_step() -> None:
    loop, reader = Loop(Script()), Reader()
    loop.submit(request("a", max_tokens=9), reader)
    loop.step()
    loop.cancel("a")
    loop.cancel("a")
    loop.cancel("nobody")
    assert loop.step() is None
    assert reader.ends() == {"a": [FinishReason.CANCELLED]}


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (EngineError("out of memory"), "out of memory"),
        (ValueError("bad shape"), "ValueError: bad shape"),
        (Sampled(()), "sampled 0 tokens where 1 were due"),
        (Sampled((SampledToken(1), SampledToken(1))), "sampled 2 tokens where 1 were due"),
    ],
)
def test_an_engine_failure_ends_its_batch_and_is_logged_once(
    failure: Exception | Sampled, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner, reader = Script(), Reader()
    loop = Loop(runner)
    runner.failures.append(failure)
    loop.submit(request("a"), reader)
    stats = loop.step()
    assert stats is not None
    assert (stats.prefill_tokens, stats.decode_rows) == (0, 0)
    loop.submit(request("b"), reader)
    loop.run_until_idle()
    assert reader.ends() == {"a": [FinishReason.ERROR], "b": [FinishReason.LENGTH]}
    assert message in reader.events["a"][0].message
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    # Our own message says it all; of anything else a reader wants to see where it came from.
    ours = isinstance(failure, EngineError | Sampled)
    assert (caplog.records[0].exc_info is None) == ours


@pytest.mark.parametrize("count", [0, 2])
def test_a_wrong_answer_to_decode_is_an_engine_failure(count: int) -> None:
    runner, reader = Script(), Reader()
    loop = Loop(runner)
    loop.submit(request("a"), reader)
    loop.step()
    runner.failures.append(Sampled((SampledToken(1),) * count))
    loop.run_until_idle()
    assert reader.ends() == {"a": [FinishReason.ERROR]}
    assert "where 1 were due" in reader.events["a"][-1].message


def test_a_reader_that_raises_hurts_no_one_else(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: TokenEvent) -> None:
        raise RuntimeError("the client has gone")

    loop, reader = Loop(Script()), Reader()
    loop.submit(request("a"), broken)
    loop.submit(request("b"), reader)
    loop.run_until_idle()
    assert reader.ends() == {"b": [FinishReason.LENGTH]}
    assert [record.getMessage() for record in caplog.records] == [
        "the reader of request 'a' failed on an event"
    ] * 2


def test_a_reader_may_submit_and_cancel() -> None:
    loop, reader = Loop(Script()), Reader()

    def chained(event: TokenEvent) -> None:
        reader(event)
        if event.finish is None:
            loop.submit(request("next", max_tokens=9), reader)
            loop.cancel("next")

    loop.submit(request("a"), chained)
    loop.run_until_idle()
    assert reader.ends() == {"a": [FinishReason.LENGTH], "next": [FinishReason.CANCELLED]}


def test_a_reader_ends_a_row_before_the_next_step() -> None:
    """As it does when it has seen a stop string."""
    loop, reader = Loop(Script()), Reader()

    def until_two(event: TokenEvent) -> None:
        reader(event)
        if event.row == 1 and len(reader.events["a"]) == 4:
            loop.cancel("a", 1, FinishReason.STOP)

    loop.submit(replace(request("a", max_tokens=5), rows=2), until_two)
    loop.run_until_idle()
    of_row = [[event for event in reader.events["a"] if event.row == row] for row in (0, 1)]
    assert [event.finish for event in of_row[0]] == [None] * 4 + [FinishReason.LENGTH]
    assert [event.finish for event in of_row[1]] == [None, None, FinishReason.STOP]


def test_a_deadline_that_passes_ends_the_request() -> None:
    loop, reader = Loop(NullRunner(LIMITS, NullOptions(step_ms=2))), Reader()
    soon = time.monotonic_ns() + 5_000_000
    loop.submit(replace(request("a", max_tokens=20), deadline_ns=soon), reader)
    loop.run_until_idle()
    assert reader.ends() == {"a": [FinishReason.TIMEOUT]}


def test_the_budget_holds_from_the_next_step_on() -> None:
    loop, reader = Loop(Script()), Reader()
    for name in "abc":
        loop.submit(request(name, prompt=1, max_tokens=4), reader)
    loop.step()
    loop.budget = PowerBudget(max_rows=2)
    stats = loop.step()
    assert stats is not None
    assert stats.decode_rows == 2


def test_after_step_follows_the_events_of_each_step() -> None:
    seen: list[object] = []
    loop = Loop(Script(), after_step=lambda stats: seen.append(stats and stats.decode_rows))
    loop.submit(request("a"), lambda event: seen.append(event.finish))
    loop.run_until_idle()
    assert seen == [None, 0, FinishReason.LENGTH, 1, None]


def test_close_cancels_all_and_closes_the_engine_once() -> None:
    runner, reader = Script(), Reader()
    loop = Loop(runner)
    for name in "abcd":
        loop.submit(request(name, max_tokens=9), reader)
    loop.step()
    loop.submit(request("in the inbox"), reader)
    loop.close()
    loop.close()
    assert sorted(reader.ends()) == [*"abcd", "in the inbox"]
    assert all(ends == [FinishReason.CANCELLED] for ends in reader.ends().values())
    assert runner.closed == 1
    with pytest.raises(EngineError, match="shut down"):
        loop.submit(request("late"), reader)


class Interrupt(Script):
    def prefill(self, chunks: Sequence[PrefillChunk], *, want_logits: bool = False) -> Sampled:
        raise KeyboardInterrupt


def test_close_after_an_interrupted_step_still_ends_every_request() -> None:
    loop, reader = Loop(Interrupt()), Reader()
    loop.submit(request("a"), reader)
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    assert reader.ends() == {"a": [FinishReason.ERROR]}
    loop.close()
    assert reader.ends() == {"a": [FinishReason.ERROR]}


def test_integrity_is_checked_when_the_loop_comes_to_rest() -> None:
    runner, reader = Script(), Reader()
    scheduler = Scheduler(LIMITS)
    loop = Loop(runner, scheduler)
    loop.submit(request("a"), reader)
    loop.run_until_idle()
    scheduler._pool.allocate(1)
    with pytest.raises(AssertionError, match="owners hold pages"):
        loop.step()


@settings(max_examples=100, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 20), st.integers(1, 12)), max_size=12
    ),
    cancels=st.dictionaries(st.integers(0, 11), st.integers(0, 30)),
    failures=st.lists(st.sampled_from([None, None, None, EngineError("injected")]), max_size=20),
)
def test_any_traffic_ends_every_request_once_with_the_tokens_it_yields_alone(
    arrivals: list[tuple[int, int, int]],
    cancels: dict[int, int],
    failures: list[Exception | Sampled | None],
) -> None:
    runner, reader = Script(), Reader()
    runner.failures = failures
    loop = Loop(runner)
    logging.disable()  # the injected failures
    try:
        for now in range(31):
            for number, (at, prompt, max_tokens) in enumerate(arrivals):
                if at == now:
                    loop.submit(request(str(number), prompt, max_tokens), reader)
                if cancels.get(number) == now:
                    loop.cancel(str(number))
            loop.step()
        loop.run_until_idle()
    finally:
        logging.disable(logging.NOTSET)
    assert set(reader.events) == {str(number) for number in range(len(arrivals))}
    for number, (_, prompt, max_tokens) in enumerate(arrivals):
        events = reader.events[str(number)]
        assert [event.finish is not None for event in events].index(True) == len(events) - 1
        tokens = [event.token for event in events if event.token is not None]
        expected = tokens_alone(request(str(number), prompt, max_tokens))
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == max_tokens or events[-1].finish is not FinishReason.LENGTH
        assert events[-1].message in ("", "injected")


def tokens_alone(one: Request) -> list[SampledToken | None]:
    loop, reader = Loop(Script()), Reader()
    loop.submit(one, reader)
    loop.run_until_idle()
    return [event.token for event in reader.events[one.id]]


@pytest.mark.parametrize("max_tokens", [2.5, float("nan"), "3", True])
def test_a_request_of_wrong_types_is_refused_at_once(max_tokens: Any) -> None:
    loop, reader = Loop(Script()), Reader()
    with pytest.raises(RequestError, match=r"max_tokens must be a whole number|whole numbers"):
        loop.submit(Request("a", (1, 2), SamplingParams(max_tokens)), reader)
    assert loop.step() is None


def test_a_token_out_of_the_vocabulary_is_an_engine_error() -> None:
    runner, reader = Script(), Reader()
    runner.failures.append(Sampled((SampledToken(999_999),)))
    loop = Loop(runner)
    loop.submit(request("a"), reader)
    loop.run_until_idle()
    assert reader.ends() == {"a": [FinishReason.ERROR]}
    assert "token 999999 of a vocabulary" in reader.events["a"][-1].message
