"""Open-loop load over HTTP: what is counted, from when, and what is warned of."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fakes.bundles import slow_bundle
from serve.conftest import Daemon, started

from edge_rt.bench import report, server
from edge_rt.bench.client import Address, Client
from edge_rt.bench.server import Load, Outcome
from edge_rt.bench.timer import Run, Timing
from edge_rt.core import FinishReason
from edge_rt.errors import EngineError

pytestmark = pytest.mark.timeout(300)

MS = 10**6
STEP_MS = 10
PROMPTS = ["def read_file(path", "import os", "The"]


@pytest.fixture(scope="module")
def slow(demo_quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that serves two requests at a time, STEP_MS for a step."""
    directory = tmp_path_factory.mktemp("slow")
    return slow_bundle(demo_quantized, directory, max_batch=2, step_ms=STEP_MS)


@pytest.fixture(scope="module")
def daemon(slow: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config = tmp_path_factory.mktemp("config") / "edge-rt.toml"
    config.write_text("[server]\nmax_queue = 4\n")
    with started(slow, "--config", str(config)) as one:
        yield one


@pytest.fixture(autouse=True)
def rest(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test has left behind is cancelled before the next begins."""
    yield
    if "daemon" in request.fixturenames:
        url, deadline = request.getfixturevalue("daemon").url, time.monotonic() + 20
        names = "edge_rt_num_requests_running", "edge_rt_num_requests_waiting"
        while True:
            page = httpx.get(f"{url}/metrics").text
            values = [
                float(re.findall(rf"^{name}{{.*}} (.*)$", page, re.MULTILINE)[0]) for name in names
            ]
            if not any(values):
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)


def nothing() -> None:
    pass


def arrive(daemon: Daemon, due_ns: list[int], max_tokens: int = 4, late_s: float = 0) -> Outcome:
    async def run() -> Outcome:
        async with Client(Address(daemon.url)) as client:
            asyncio.get_running_loop().call_soon(time.sleep, late_s)
            return await server.arrive(client, Load(PROMPTS, max_tokens, 1.0), due_ns, nothing)

    return asyncio.run(run())


def test_requests_come_when_they_are_due(daemon: Daemon) -> None:
    due_ns = [0, 100 * MS, 150 * MS, 700 * MS]
    outcome = arrive(daemon, due_ns)
    timings = outcome.run.timings
    zero_ns = timings[0].submitted_ns
    assert [timing.submitted_ns - zero_ns for timing in timings] == due_ns
    for timing in timings:
        assert len(timing.token_ns) == 4
        assert timing.token_ns[0] >= timing.submitted_ns + STEP_MS * MS
    assert outcome.run.wall_ns >= 700 * MS
    assert outcome.refused == 0
    assert outcome.prompt_tokens > len(timings)


def test_latency_counts_from_when_a_request_was_due_and_not_sent(daemon: Daemon) -> None:
    outcome = arrive(daemon, [0, 10 * MS], late_s=0.5)
    assert min(report.ttft_ms(outcome.run)) >= 490


def test_requests_go_out_though_others_are_unanswered(daemon: Daemon) -> None:
    outcome = arrive(daemon, [0, 20 * MS], max_tokens=40)
    first, second = outcome.run.timings
    assert second.token_ns[0] < first.ended_ns  # the daemon serves two at a time


def test_refusals_are_counted_and_no_part_of_the_timings(daemon: Daemon) -> None:
    outcome = arrive(daemon, [0] * 12, max_tokens=40)
    assert outcome.refused == 8
    assert len(outcome.run.timings) == 4
    (warning,) = server.overload(outcome, 1.0)
    assert warning.startswith("the daemon refused 8 of 12 requests")


def test_a_daemon_that_dies_ends_the_run(slow: Path) -> None:
    with started(slow) as daemon:

        async def run() -> None:
            async with Client(Address(daemon.url)) as client:
                asyncio.get_running_loop().call_later(0.5, daemon.process.kill)
                await server.arrive(client, Load(PROMPTS, 400, 1.0), [0, 10**12], nothing)

        begun = time.monotonic()
        with pytest.raises(EngineError, match="broke"):
            asyncio.run(run())
        assert time.monotonic() - begun < 60  # and not until the last is due


def test_all_refused_is_an_error(daemon: Daemon) -> None:
    async def run() -> None:
        async with Client(Address(daemon.url)) as client, Client(Address(daemon.url)) as other:
            load = Load(PROMPTS, 400, 1.0)
            filling = asyncio.ensure_future(server.arrive(other, load, [0] * 4, nothing))
            await asyncio.sleep(1)
            with pytest.raises(EngineError, match=r"all 3 requests were refused: .*429"):
                await server.arrive(client, load, [0] * 3, nothing)
            filling.cancel()

    asyncio.run(run())


def test_prepare_finds_prompts_and_a_rate(daemon: Daemon) -> None:
    async def run() -> Load:
        async with Client(Address(daemon.url)) as client:
            load = await server.prepare(client, 16, 48, 8, rate_per_s=None, concurrency=2)
            given = await server.prepare(client, 16, 48, 8, rate_per_s=3.5)
            assert (given.rate_per_s, given.capacity_per_s) == (3.5, None)
            counted = [
                await client.complete(text, 1, Timing("", time.monotonic_ns()))
                for text in load.prompts
            ]
            assert sum(counted) / len(counted) == pytest.approx(48, rel=0.3)
            with pytest.raises(EngineError, match=r"429.*at warm-up, with 16 .* --rate"):
                await server.prepare(client, 16, 48, 8, rate_per_s=None, concurrency=16)
            return load

    load = asyncio.run(run())
    assert load.capacity_per_s is not None
    assert 0 < load.capacity_per_s <= 2 / (8 * STEP_MS * 1e-3)  # two at a time, 8 steps each
    assert load.rate_per_s == pytest.approx(0.7 * load.capacity_per_s, rel=0.01)


def outcome_of(latencies_ms: list[float], every_ms: float) -> Outcome:
    timings = tuple(
        Timing(
            f"{index}",
            round(index * every_ms * MS),
            [1],
            round((index * every_ms + latency) * MS),
            FinishReason.LENGTH,
        )
        for index, latency in enumerate(latencies_ms)
    )
    return Outcome(Run(timings, server.wall_ns(timings)), 1)


def test_a_queue_that_grows_is_warned_of() -> None:
    growing = outcome_of([50.0 + 10 * index for index in range(100)], 20)
    (warning,) = server.overload(growing, 50)
    assert "more than the daemon can take: of 50 requests/s it answered 32.8" in warning
    steady_but_slow = outcome_of([1000.0] * 100, 20)
    later_but_kept_up = outcome_of([10.0] * 50 + [20.0] * 50, 20)
    too_few_to_tell = outcome_of([50.0 + 10 * index for index in range(20)], 20)
    for fine in (steady_but_slow, later_but_kept_up, too_few_to_tell):
        assert server.overload(fine, 50) == []
