"""Random arrivals over the loop: when they come, and what static batching does to them."""

from __future__ import annotations

import numpy as np
import pytest

from edge_rt.bench import arrivals
from edge_rt.bench.arrivals import Arrival
from edge_rt.core import Limits
from edge_rt.loop import Loop
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner

LIMITS = Limits(2, 2, 64, 16, 2, 64, 64, 100)
PROMPT = (1, 2, 3)


def loop(step_ms: float = 1.0) -> Loop:
    return Loop(NullRunner(LIMITS, NullOptions(step_ms=step_ms)))


def test_waits_are_exponential_at_the_rate() -> None:
    plan = arrivals.poisson([PROMPT] * 20_000, [4] * 20_000, rate_per_s=50.0, seed=1)
    at_s = np.array([one.at_ns for one in plan]) * 1e-9
    waits = np.diff(at_s, prepend=0)
    assert (waits >= 0).all()
    assert waits.mean() == pytest.approx(1 / 50, rel=0.03)
    assert waits.std() == pytest.approx(1 / 50, rel=0.05)
    assert plan == arrivals.poisson([PROMPT] * 20_000, [4] * 20_000, 50.0, 1)
    assert plan != arrivals.poisson([PROMPT] * 20_000, [4] * 20_000, 50.0, 2)


def test_a_request_starts_no_earlier_than_it_is_due() -> None:
    plan = [Arrival(at * 20_000_000, PROMPT, 3) for at in range(4)]
    run = arrivals.serve(loop(), plan)
    started = run.timings[0].submitted_ns
    for one, timing in zip(plan, run.timings, strict=True):
        assert timing.submitted_ns == started + one.at_ns
        assert timing.token_ns[0] >= timing.submitted_ns
        assert len(timing.token_ns) == 3


def ends(static_batch: int | None) -> list[int]:
    """Numbers of the requests in the order in which they end: a long one, then short ones."""
    plan = [Arrival(0, PROMPT, 30), *(Arrival(0, PROMPT, 2) for _ in range(3))]
    run = arrivals.serve(loop(), plan, static_batch)
    return sorted(range(4), key=lambda number: run.timings[number].ended_ns)


def test_in_flight_short_requests_go_past_a_long_one() -> None:
    assert ends(None)[-1] == 0


def test_a_static_batch_waits_for_its_longest() -> None:
    assert ends(2) == [1, 0, 2, 3]
