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
        if event.finish is not None:
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
        timings.append(_submit(loop, f"single-{index}", prompt, max_tokens, on_end))
        loop.run_until_idle()
    return _finished(timings, started_ns)


def offline(loop: Loop, prompts: Sequence[Prompt], max_tokens: int, on_end: OnEnd = _ignore) -> Run:
    """All requests at once; `on_end` is called at the end of each."""
    started_ns = time.monotonic_ns()
    timings = [
        _submit(loop, f"offline-{index}", prompt, max_tokens, on_end)
        for index, prompt in enumerate(prompts)
    ]
    loop.run_until_idle()
    return _finished(timings, started_ns)


def _submit(loop: Loop, request_id: str, prompt: Prompt, max_tokens: int, on_end: OnEnd) -> Timing:
    timing = Timing(request_id, time.monotonic_ns(), on_end=on_end)
    # No stop token: every sample does the same work, so that runs compare.
    loop.submit(Request(request_id, prompt, SamplingParams(max_tokens)), timing.on_event)
    return timing


def _finished(timings: Sequence[Timing], started_ns: int) -> Run:
    for timing in timings:
        if timing.finish is not FinishReason.LENGTH:  # half an answer is no measurement
            raise EngineError(f"request {timing.request_id} failed: {timing.message}")
    return Run(tuple(timings), time.monotonic_ns() - started_ns)
