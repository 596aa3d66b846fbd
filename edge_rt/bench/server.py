"""Requests that arrive at random at a running daemon, over HTTP (MLPerf's Server scenario).

An open loop: requests come when they are due, however many are unanswered, and each one's latency
counts from the moment at which it was due. A generator that waited for answers would measure least
where the daemon is slowest.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from edge_rt.bench import report, workloads
from edge_rt.bench.client import Client, Refused
from edge_rt.bench.signals import signals_held
from edge_rt.bench.timer import OnEnd, Run, Timing
from edge_rt.errors import EngineError

SHARE = 0.7  # of what the daemon can do: where servers are run, and queues are short
CONCURRENCY = 16  # the most that a recipe serves at once
PROBES = 4  # requests that tell how many characters a token has
_PROBE_CHARACTERS = 2  # for each token that is asked for: less than a token has on average

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """What is to arrive; `capacity_per_s` is what a closed loop reached, if it was run."""

    prompts: Sequence[str]
    max_tokens: int
    rate_per_s: float
    capacity_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Timings of the requests that were answered, in the order in which they were due."""

    run: Run
    prompt_tokens: int  # of all of them, as the daemon counts
    refused: int = 0


def interruptible(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` as asyncio.run does; an interrupt cancels it, and is raised when it has ended."""

    async def run() -> T:
        task = asyncio.ensure_future(work())
        aio = asyncio.get_running_loop()

        def stop() -> None:
            aio.call_soon_threadsafe(task.cancel)

        with signals_held(stop):
            return await task

    return asyncio.run(run())


async def prepare(
    client: Client,
    samples: int,
    prompt_tokens: int,
    max_tokens: int,
    *,
    rate_per_s: float | None,
    concurrency: int = CONCURRENCY,
) -> Load:
    """Warm up and find what to offer: prompts of about `prompt_tokens`, SHARE of the capacity.

    EngineError or ConfigError if the daemon cannot be measured.
    """
    await client.check()
    texts = workloads.held_out_texts(PROBES, prompt_tokens * _PROBE_CHARACTERS)
    found = [await client.complete(text, 1, _timing("warm-up")) for text in texts]
    characters = round(prompt_tokens * sum(map(len, texts)) / sum(found))
    prompts = workloads.held_out_texts(samples, max(1, characters))
    await client.complete(prompts[0], max_tokens, _timing("warm-up"))
    if rate_per_s is not None:
        return Load(prompts, max_tokens, rate_per_s)
    capacity_per_s = await _closed_loop(client, prompts, max_tokens, concurrency)
    return Load(prompts, max_tokens, float(f"{SHARE * capacity_per_s:.3g}"), capacity_per_s)


async def _closed_loop(
    client: Client, prompts: Sequence[str], max_tokens: int, concurrency: int
) -> float:
    """Requests a second with `concurrency` of them always under way, over twice as many."""
    left = itertools.islice(itertools.cycle(prompts), 2 * concurrency)

    async def user() -> None:
        for prompt in left:
            await client.complete(prompt, max_tokens, _timing("warm-up"))

    started_ns = time.monotonic_ns()
    try:
        await _all(user() for _ in range(concurrency))
    except Refused as error:
        raise EngineError(
            f"{error} (at warm-up, with {concurrency} requests at once); say what to offer by "
            f"--rate"
        ) from error
    return 2 * concurrency / ((time.monotonic_ns() - started_ns) * 1e-9)


async def arrive(client: Client, load: Load, due_ns: Sequence[int], on_end: OnEnd) -> Outcome:
    """Send a request at each of `due_ns` after the start, and wait for all answers.

    A request that gets 429 is counted; EngineError at the first other failure, or if all do.
    """
    started_ns, aio = time.monotonic_ns(), asyncio.get_running_loop()
    started = aio.time()
    counts: list[int] = []
    refusals: list[Refused] = []

    async def one(timing: Timing, prompt: str, at_ns: int) -> None:
        await asyncio.sleep(started + at_ns * 1e-9 - aio.time())
        try:
            counts.append(await client.complete(prompt, load.max_tokens, timing))
        except Refused as refusal:
            refusals.append(refusal)
            on_end()

    timings = [
        Timing(f"server-{index}", started_ns + at_ns, on_end=on_end)
        for index, at_ns in enumerate(due_ns)
    ]
    await _all(map(one, timings, itertools.cycle(load.prompts), due_ns))
    if not counts:
        raise EngineError(f"all {len(timings)} requests were refused: {refusals[0]}")
    answered = tuple(timing for timing in timings if timing.finish is not None)
    return Outcome(Run(answered, wall_ns(answered)), sum(counts), len(refusals))


def wall_ns(timings: Sequence[Timing]) -> int:
    """From when the first was due to when the last was answered."""
    return max(timing.ended_ns for timing in timings) - timings[0].submitted_ns


def overload(outcome: Outcome, rate_per_s: float) -> list[str]:
    """A warning if the daemon could not take the load: it refused, or its queue grew.

    A queue grows if answers come more slowly than requests while these arrive, and if those that
    came later waited longer; each alone is also true of slow answers in a short run.
    """
    found, timings = [], outcome.run.timings
    offered = len(timings) + outcome.refused
    if outcome.refused:
        found.append(
            f"the daemon refused {outcome.refused} of {offered} requests: the load was more than "
            f"it can take, and latencies are those of the others"
        )
    arriving_s = (timings[-1].submitted_ns - timings[0].submitted_ns) * 1e-9
    if len(timings) < report.MIN_SAMPLES / 2 or not arriving_s:
        return found
    in_time = sum(timing.ended_ns <= timings[-1].submitted_ns for timing in timings)
    half = len(timings) // 2
    latency_ms = report.latency_ms(outcome.run)
    early_ms, late_ms = (statistics.median(p) for p in (latency_ms[:half], latency_ms[half:]))
    if in_time < 0.9 * len(timings) and late_ms > 1.5 * early_ms:
        found.append(
            f"the load was more than the daemon can take: of {rate_per_s:g} requests/s it answered "
            f"{in_time / arriving_s:.3g}, and its queue grew (latency p50 {early_ms:.0f} ms in the "
            f"first half, {late_ms:.0f} ms in the second); offer less by --rate"
        )
    return found


async def _all(work: Any) -> None:
    """Wait for all; at the first failure, or if cancelled, cancel the others and raise it."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _timing(name: str) -> Timing:
    return Timing(name, time.monotonic_ns())
