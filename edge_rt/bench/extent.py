"""How much a measurement takes in."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from edge_rt.bench.report import MIN_SAMPLES
from edge_rt.bench.timer import Prompt

T = TypeVar("T")

_OFFLINE_SLACK = 1.1  # LoadGen's own, so that both timers hand in as many samples


@dataclass(frozen=True, slots=True)
class Extent:
    """At least `samples` requests, and at least `duration_s` seconds of them."""

    samples: int
    duration_s: float = 0.0

    def single_stream(self, prompts: Sequence[Prompt]) -> Iterator[Prompt]:
        """`prompts` over and over; ends once there were enough and the time has passed."""
        started_ns = time.monotonic_ns()
        for count, prompt in enumerate(itertools.cycle(prompts)):
            passed_s = (time.monotonic_ns() - started_ns) * 1e-9
            if count >= self.samples and passed_s >= self.duration_s:
                return
            yield prompt

    def offline(self, prompts: Sequence[T], samples_per_s: float) -> list[T]:
        """`prompts` over and over: as many as last `duration_s` at `samples_per_s`, and a tenth."""
        lasting = int(_OFFLINE_SLACK * self.duration_s * samples_per_s)
        return list(itertools.islice(itertools.cycle(prompts), max(self.samples, lasting)))


DEFAULT = Extent(MIN_SAMPLES, duration_s=10.0)  # MLPerf's own runs last 10 minutes
