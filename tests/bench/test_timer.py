from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from fakes.loops import BENCH_LIMITS

from edge_rt.bench import timer
from edge_rt.core import DecodeRow
from edge_rt.errors import EngineError
from edge_rt.loop import Loop
from edge_rt.recipes import NullOptions
from edge_rt.runtime.base import Sampled
from edge_rt.runtime.null import NullRunner

PROMPTS = [(1, 2, 3), (4,), tuple(range(40)), (5, 6), (7,), (8,)]


def null_loop() -> Loop:
    return Loop(NullRunner(BENCH_LIMITS, NullOptions()))


def test_single_stream_waits_for_each_request() -> None:
    run = timer.single_stream(null_loop(), PROMPTS, max_tokens=5)
    assert [len(t.token_ns) for t in run.timings] == [5] * len(PROMPTS)
    for earlier, later in zip(run.timings, run.timings[1:], strict=False):
        assert earlier.ended_ns <= later.submitted_ns
    assert sum(t.ended_ns - t.submitted_ns for t in run.timings) <= run.wall_ns


def test_offline_batches_requests() -> None:
    run = timer.offline(null_loop(), PROMPTS, max_tokens=5)
    assert [len(t.token_ns) for t in run.timings] == [5] * len(PROMPTS)
    assert max(t.submitted_ns for t in run.timings) < min(t.ended_ns for t in run.timings)


class Dying(NullRunner):
    """Fails at its third decode call."""

    calls = 0

    def decode(self, rows: Sequence[DecodeRow], *, want_logits: bool = False) -> Sampled:
        self.calls += 1
        if self.calls == 3:
            raise EngineError("the device is lost")
        return super().decode(rows, want_logits=want_logits)


@pytest.mark.parametrize("scenario", [timer.single_stream, timer.offline])
def test_half_an_answer_is_no_measurement(scenario: Callable[..., timer.Run]) -> None:
    with pytest.raises(EngineError, match=r"request .* failed: the device is lost"):
        scenario(Loop(Dying(BENCH_LIMITS, NullOptions())), PROMPTS, max_tokens=5)
