"""Measurements on a loop that runs in another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from fakes.loops import BENCH_LIMITS, Reader

from edge_rt.bench.live import LiveBench
from edge_rt.core import Request, SamplingParams
from edge_rt.errors import EngineError, RequestError
from edge_rt.loop import Loop
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner

PROMPTS = [(1, 2, 3), (4,), (5, 6)]


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop(NullRunner(BENCH_LIMITS, NullOptions(step_ms=0.2)))
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield loop
    loop.stop()
    thread.join()
    loop.close()


def test_single_stream_waits_for_each_request(loop: Loop) -> None:
    run = LiveBench(loop, PROMPTS, max_tokens=5).single_stream(7)
    assert [len(t.token_ns) for t in run.timings] == [5] * 7
    for earlier, later in zip(run.timings, run.timings[1:], strict=False):
        assert earlier.ended_ns <= later.submitted_ns
    assert sum(t.ended_ns - t.submitted_ns for t in run.timings) <= run.wall_ns


def test_offline_hands_all_in_at_once(loop: Loop) -> None:
    run = LiveBench(loop, PROMPTS, max_tokens=5).offline(9)
    assert [len(t.token_ns) for t in run.timings] == [5] * 9
    assert len({t.submitted_ns for t in run.timings}) == 1
    ends = sorted(t.ended_ns for t in run.timings)
    assert ends[3] < min(t.token_ns[0] for t in run.timings if t.ended_ns == ends[-1])


def test_beside_others(loop: Loop) -> None:
    reader = Reader()
    loop.submit(Request("other", (1, 2), SamplingParams(40)), reader)
    LiveBench(loop, PROMPTS, max_tokens=50).single_stream(2)
    assert reader.ends()["other"]


def test_a_request_that_can_never_be_served(loop: Loop) -> None:
    with pytest.raises(RequestError):
        LiveBench(loop, PROMPTS, max_tokens=500).offline(2)


def test_an_engine_that_is_shut_down_is_no_measurement() -> None:
    loop = Loop(NullRunner(BENCH_LIMITS, NullOptions(step_ms=5)))
    thread = threading.Thread(target=loop.run)
    thread.start()
    stopping = threading.Timer(0.1, loop.stop)
    stopping.start()

    def close() -> None:
        thread.join()
        loop.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(EngineError):
        LiveBench(loop, PROMPTS, max_tokens=40).single_stream(1000)
    closing.join()
