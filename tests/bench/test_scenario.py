"""From warm-up to timings: what is expected, how many samples there are, and which timer runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_rt.bench import extent, timer, verdict, warmup
from edge_rt.bench.extent import Extent
from edge_rt.bench.scenario import Name, Scenario
from edge_rt.core import Limits
from edge_rt.loop import Loop
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner

pytestmark = pytest.mark.timeout(120)

LIMITS = Limits(4, 4, 64, 16, 4, 64, 64, 100)
PROMPTS = [(1, 2, 3), (4, 5, 6), (7, 8, 9)]


def loop(step_ms: float = 0.0) -> Loop:
    return Loop(NullRunner(LIMITS, NullOptions(step_ms=step_ms)))


def nothing() -> None:
    pass


def test_the_default_is_64_requests_and_10_s() -> None:
    assert Extent(64, 10.0) == extent.DEFAULT


def test_single_stream_goes_on_until_both_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 10**9)  # a second at each look
    monkeypatch.setattr("edge_rt.bench.extent.time.monotonic_ns", lambda: next(clock))
    assert len(list(Extent(64, 10.0).single_stream(PROMPTS))) == 64
    assert len(list(Extent(4, 10.0).single_stream(PROMPTS))) == 9
    assert list(Extent(4).single_stream(PROMPTS)) == [*PROMPTS, PROMPTS[0]]


def test_offline_has_as_many_as_loadgen_issues() -> None:
    assert len(Extent(64, 10.0).offline(PROMPTS, 2.0)) == 64
    assert len(Extent(64, 10.0).offline(PROMPTS, 20.0)) == 220
    assert Extent(4).offline(PROMPTS, 1000.0) == [*PROMPTS, PROMPTS[0]]


def test_what_is_expected_comes_from_a_full_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def offline(_loop: Loop, prompts: list[timer.Prompt], _max_tokens: int) -> timer.Run:
        seen.append(len(prompts))
        return timer.Run((), wall_ns=2 * 10**9)

    monkeypatch.setattr(timer, "offline", offline)
    found = warmup.expected_samples_per_s(loop(), PROMPTS, max_tokens=3, max_batch=4)
    assert seen == [8]
    assert found == pytest.approx(warmup.HEADROOM * 8 / 2)


def test_a_request_alone_takes_no_less_than_is_expected() -> None:
    found_s = warmup.expected_latency_s(loop(10.0), PROMPTS, max_tokens=3)
    assert 0.030 / warmup.HEADROOM <= found_s < 0.3


def test_the_warm_up_decides_what_loadgen_expects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def expected(_loop: Loop, _prompts: Any, _max_tokens: int, max_batch: int) -> float:
        seen.append(max_batch)
        return 40.0

    monkeypatch.setattr(warmup, "expected_samples_per_s", expected)
    job = Scenario("offline", PROMPTS, 3, Extent(4, duration_s=0.5), max_batch=4)
    run = job.by_loadgen(loop(), tmp_path, nothing)
    assert verdict.read(tmp_path).values["requested_offline_expected_qps"] == 40
    assert len(run.timings) == 22
    assert len(job.by_own_timer(loop(), nothing).timings) == 22
    assert seen == [4, 4]


@pytest.mark.parametrize("name", ["single-stream", "offline"])
def test_both_timers_do_the_same_work(name: Name, tmp_path: Path) -> None:
    job = Scenario(name, PROMPTS, 5, Extent(64), max_batch=4)
    ways: list[Callable[[], timer.Run]] = [
        lambda: job.by_own_timer(loop(1.0), nothing),
        lambda: job.by_loadgen(loop(1.0), tmp_path, nothing),
    ]
    for way in ways:
        run = way()
        assert len(run.timings) == 64
        assert {len(timing.token_ns) for timing in run.timings} == {5}
        at_once = len({timing.submitted_ns for timing in run.timings}) == 1
        assert at_once is (name == "offline")
        # 5 steps of 1 ms each; 4 of 64 share them if they come at once.
        assert run.wall_ns >= 64 * 5e6 / (4 if at_once else 1)
        assert job.shortfall(run) == []


def test_a_run_that_was_too_short_is_warned_of() -> None:
    job = Scenario("offline", PROMPTS, 2, Extent(4, duration_s=60), max_batch=4)
    run = Scenario("offline", PROMPTS, 2, Extent(4), max_batch=4).by_own_timer(loop(), nothing)
    assert job.shortfall(run) == ["the run took 0.0 s, less than 60 s"]
