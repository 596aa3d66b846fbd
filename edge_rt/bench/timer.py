"""Our own timer for the two edge scenarios of MLPerf Inference.

Single-stream sends one request after another and looks at latency; offline hands in all requests
at once and looks at throughput. Both go through the loop that serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from edge_rt.core import FinishReason, Request, SamplingParams, TokenEvent
from edge_rt.errors import EngineError
from edge_rt.loop import Loop

Prompt = tuple[int, ...]
OnEnd = Callable[[], None]


def _ignore() -> None:
    pass


@dataclass(slots=True)
class Timing:
    """When one request was handed in and when each of its tokens came; monotonic nanoseconds."""

    request_id: str
    submitted_ns: int
    token_ns: list[int] = field(default_factory=list)
    ended_ns: int = 0
    finish: FinishReason | None = None
    message: str = ""
    on_end: OnEnd = _ignore

    def on_event(self, event: TokenEvent) -> None:
        """Take one of the loop's events of this request."""
        now_ns = time.monotonic_ns()
        if event.token is not None:
            self.token_ns.append(now_ns)
        if event.is_last:
            self.ended_ns = now_ns
            self.finish, self.message = event.finish, event.message
            self.on_end()


@dataclass(frozen=True, slots=True)
class Run:
    """Timings of all requests of one measurement, which took `wall_ns`."""

    timings: tuple[Timing, ...]
    wall_ns: int


def single_stream(
    loop: Loop, prompts: Iterable[Prompt], max_tokens: int, on_end: OnEnd = _ignore
) -> Run:
    """One request at a time; `on_end` is called at the end of each."""
    started_ns = time.monotonic_ns()
    timings = []
    for index, prompt in enumerate(prompts):
        timing = Timing(f"single-{index}", time.monotonic_ns(), on_end=on_end)
        timings.append(timing)
        loop.submit(request(timing.request_id, prompt, max_tokens), timing.on_event)
        loop.run_until_idle()
    return finished(timings, started_ns)


def offline(loop: Loop, prompts: Sequence[Prompt], max_tokens: int, on_end: OnEnd = _ignore) -> Run:
    """All requests at once; `on_end` is called at the end of each.

    Latencies count from the start, as LoadGen's do.
    """
    started_ns = time.monotonic_ns()
    timings = [
        Timing(f"offline-{index}", started_ns, on_end=on_end) for index in range(len(prompts))
    ]
    for timing, prompt in zip(timings, prompts, strict=True):
        loop.submit(request(timing.request_id, prompt, max_tokens), timing.on_event)
    loop.run_until_idle()
    return finished(timings, started_ns)


def request(request_id: str, prompt: Prompt, max_tokens: int) -> Request:
    """A sample: no stop token, so that every one does the same work and runs compare."""
    return Request(request_id, prompt, SamplingParams(max_tokens))


def finished(timings: Sequence[Timing], started_ns: int) -> Run:
    """The measurement that began at `started_ns`; EngineError if a request did not end whole."""
    for timing in timings:
        if timing.finish is not FinishReason.LENGTH:  # half an answer is no measurement
            raise EngineError(f"request {timing.request_id} failed: {timing.message}")
    return Run(tuple(timings), time.monotonic_ns() - started_ns)
