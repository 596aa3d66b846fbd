"""How often values fell into which bucket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def decades(lowest: float, highest: float) -> tuple[float, ...]:
    """1, 2.5 and 5 times each power of ten that are not outside `lowest` to `highest`."""
    steps = (float(f"{digit}e{power}") for power in range(-9, 10) for digit in (1, 2.5, 5))
    return tuple(step for step in steps if lowest <= step <= highest)


class Histogram:
    """Counts by upper bound, in Prometheus' sense: a value falls into the first bound >= it.

    Written by one thread and read by any, without a lock: a reader may find `sum` some values off
    the counts.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), bounds
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Bound as text, and how many values are not above it; the last bound is +Inf."""
        found, below = [], 0
        for bound, count in zip((*self._bounds, float("inf")), tuple(self._counts), strict=True):
            below += count
            found.append(("+Inf" if bound == float("inf") else repr(bound), float(below)))
        return found
