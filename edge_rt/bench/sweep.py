"""Throughput and decode time over batch size: a few requests at each, by our own timer."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from edge_rt.bench import timer
from edge_rt.bench.timer import OnEnd, Prompt
from edge_rt.core import StepStats
from edge_rt.loop import Loop

ROUNDS = 2  # of a full batch at each size
_WARM_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Point:
    """One batch size; `decode_step_ms` is None where no step decoded it alone and whole."""

    batch: int
    throughput_tok_s: float
    decode_step_ms: float | None


class Steps:
    """A loop's `after_step` that keeps what steps took, while it is asked to."""

    def __init__(self) -> None:
        self.kept: list[StepStats] | None = None

    def __call__(self, stats: StepStats | None) -> None:
        """Take one step."""
        if self.kept is not None and stats is not None:
            self.kept.append(stats)


def batches(max_batch: int) -> list[int]:
    """1, 2, 4 and so on, and the largest."""
    powers = itertools.takewhile(lambda size: size < max_batch, (2**n for n in itertools.count()))
    return [*powers, max_batch]


def requests(max_batch: int) -> int:
    """How many requests a sweep makes."""
    return sum((1 + ROUNDS) * size for size in batches(max_batch))


def measure(
    loop: Loop,
    steps: Steps,
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    max_batch: int,
    on_end: OnEnd,
) -> list[Point]:
    """A point for each of `batches`; `steps` is the loop's `after_step`."""
    points = []
    for size in batches(max_batch):
        batch = list(itertools.islice(itertools.cycle(prompts), size))
        timer.offline(loop, batch, min(_WARM_TOKENS, max_tokens), on_end)
        steps.kept = []
        runs = [timer.offline(loop, batch, max_tokens, on_end) for _ in range(ROUNDS)]
        times_ns = [
            stats.decode_ns
            for stats in steps.kept
            if stats.decode_rows == size and stats.prefill_tokens == 0
        ]
        steps.kept = None
        points.append(
            Point(
                batch=size,
                throughput_tok_s=ROUNDS * size * max_tokens / (sum(r.wall_ns for r in runs) * 1e-9),
                decode_step_ms=statistics.median(times_ns) * 1e-6 if times_ns else None,
            )
        )
    return points
