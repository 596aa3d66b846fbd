from __future__ import annotations

import pytest

from edge_rt.bench import timer
from edge_rt.core import Limits
from edge_rt.errors import EngineError
from edge_rt.loop import Loop
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner

LIMITS = Limits(
    max_requests=4,
    max_rows=4,
    max_tokens_per_step=64,
    prefill_chunk=16,
    pages=4,
    page_tokens=64,
    max_context=64,
    vocab_size=100,
)
PROMPTS = [(1, 2, 3), (4,), tuple(range(40)), (5, 6), (7,), (8,)]


def null_loop(step_ms: float = 0.0) -> Loop:
    return Loop(NullRunner(LIMITS, NullOptions(step_ms=step_ms)))


def test_single_stream_waits_for_each_request() -> None:
    run = timer.single_stream(null_loop(), PROMPTS, max_tokens=5)
    assert [len(t.token_ns) for t in run.timings] == [5] * len(PROMPTS)
    for earlier, later in zip(run.timings, run.timings[1:], strict=False):
        assert earlier.ended_ns <= later.submitted_ns
    assert sum(t.ended_ns - t.submitted_ns for t in run.timings) <= run.wall_ns


def test_offline_batches_requests() -> None:
    run = timer.offline(null_loop(step_ms=2.0), PROMPTS, max_tokens=5)
    assert [len(t.token_ns) for t in run.timings] == [5] * len(PROMPTS)
    # All are in before the first is out, and together they take less than one after another.
    assert max(t.submitted_ns for t in run.timings) < min(t.ended_ns for t in run.timings)
    alone = timer.single_stream(null_loop(step_ms=2.0), PROMPTS, max_tokens=5)
    assert run.wall_ns < alone.wall_ns


def test_a_failed_request_is_no_measurement() -> None:
    loop = null_loop()
    loop.close()
    with pytest.raises(EngineError, match="shut down"):
        timer.offline(loop, PROMPTS, max_tokens=5)
