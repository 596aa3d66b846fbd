"""The two edge scenarios on a loop that runs in a thread of its own, and may serve others too."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_rt.bench.timer import Prompt, Run, Timing, finished, request
from edge_rt.core import Priority
from edge_rt.loop import Loop


@dataclass(frozen=True, slots=True)
class LiveBench:
    """`prompts` take turns, each is continued by exactly `max_tokens`; batch requests all.

    EngineError if a request does not end whole, RequestError if none ever could.
    """

    loop: Loop
    prompts: Sequence[Prompt]
    max_tokens: int

    def single_stream(self, samples: int) -> Run:
        """One request after another, behind one that is not measured."""
        self._run(1)
        started_ns = time.monotonic_ns()
        timings = [self._run(1, first=number)[0] for number in range(samples)]
        return finished(timings, started_ns)

    def offline(self, samples: int) -> Run:
        """All requests at once, behind one that is not measured."""
        self._run(1)
        started_ns = time.monotonic_ns()
        return finished(self._run(samples), started_ns)

    def _run(self, samples: int, first: int = 0) -> list[Timing]:
        """Hand requests in and wait until all have ended."""
        ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        started_ns = time.monotonic_ns()
        timings = []
        for number in range(first, first + samples):
            name = f"bench-{uuid.uuid4().hex}"
            timing = Timing(name, started_ns, on_end=lambda: ended.put(None))
            prompt = self.prompts[number % len(self.prompts)]
            one = request(name, prompt, self.max_tokens)
            self.loop.submit(replace(one, priority=Priority.BATCH), timing.on_event)
            timings.append(timing)
        for _ in timings:
            ended.get()
        return timings
