"""Requests that come at random, as users do, over the loop in one process.

Poisson arrivals: waits between requests are exponentially distributed (MLPerf's Server scenario).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_rt.bench.timer import Prompt, Run, Timing, finished, request
from edge_rt.loop import Loop


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes `at_ns` after the start."""

    at_ns: int
    prompt: Prompt
    max_tokens: int


def poisson(
    prompts: Sequence[Prompt], max_tokens: Sequence[int], rate_per_s: float, seed: int
) -> list[Arrival]:
    """One arrival for each prompt, `rate_per_s` on average."""
    at_ns = poisson_ns(len(prompts), rate_per_s, seed)
    return [Arrival(*one) for one in zip(at_ns, prompts, max_tokens, strict=True)]


def poisson_ns(count: int, rate_per_s: float, seed: int) -> list[int]:
    """When `count` requests are due, in nanoseconds after the start."""
    waits_s = np.random.default_rng(seed).exponential(1 / rate_per_s, count)
    at_ns: list[int] = (np.cumsum(waits_s) * 1e9).astype(np.int64).tolist()
    return at_ns


def serve(loop: Loop, arrivals: Sequence[Arrival], static_batch: int | None = None) -> Run:
    """Answer all; latency counts from the moment at which a request was due.

    With `static_batch`, as servers without in-flight batching do: at most that many of those that
    wait start together, and the next start when all of them have ended.
    """
    started_ns = time.monotonic_ns()
    timings: list[Timing] = []
    ended: list[None] = []
    waiting = list(arrivals)[::-1]
    while waiting or len(ended) < len(timings):
        now_ns = time.monotonic_ns() - started_ns
        idle = len(ended) == len(timings)
        room = len(waiting) if static_batch is None else static_batch * idle
        while waiting and waiting[-1].at_ns <= now_ns and room:
            one, room = waiting.pop(), room - 1
            timing = Timing(
                f"{len(timings)}", started_ns + one.at_ns, on_end=lambda: ended.append(None)
            )
            timings.append(timing)
            loop.submit(request(timing.request_id, one.prompt, one.max_tokens), timing.on_event)
        if len(ended) < len(timings):
            loop.step()
        elif waiting:
            time.sleep(max(0, waiting[-1].at_ns - (time.monotonic_ns() - started_ns)) * 1e-9)
    return finished(timings, started_ns)
