"""Requests that wait, in the order in which they are to be admitted."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from edge_rt.core import Priority
from edge_rt.errors import ConfigError
from edge_rt.sched.rows import Live


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """When a request may start."""

    ageing_ms: float = field(
        default=5000.0,
        metadata={"doc": "A batch request that has waited so long goes like an interactive one."},
    )
    batching_window_ms: float = field(
        default=0.0,
        metadata={"doc": "An idle engine waits so long for company before it starts."},
    )

    def __post_init__(self) -> None:
        for name in ("ageing_ms", "batching_window_ms"):
            if not 0 <= getattr(self, name) <= 86_400_000:
                raise ConfigError(f"{name} must be 0 to 86400000 (a day)")


class Queue:
    """First come, first served within a priority; the lower priority goes first, until one ages.

    A request that has aged counts as of the first priority, where its arrival then
    puts it ahead: no stream of interactive requests can starve batch ones.
    """

    def __init__(self, options: SchedulerOptions) -> None:
        self._ageing_ns = int(options.ageing_ms * 1e6)
        self._heaps: dict[Priority, list[tuple[int, Live]]] = {one: [] for one in Priority}
        self._waiting: set[Live] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, live: Live) -> bool:
        return live in self._waiting

    def push(self, live: Live) -> None:
        """Let a request wait; one that has waited before takes its old place."""
        assert live not in self._waiting, live
        self._waiting.add(live)
        heapq.heappush(self._heaps[live.request.priority], (live.number, live))

    def remove(self, live: Live) -> None:
        """Take a request out, wherever it stands."""
        self._waiting.remove(live)  # its entry in the heap goes when it comes up

    def first(self, now_ns: int) -> Live | None:
        """The next to be admitted; it stays in."""
        if not self._waiting:
            return None
        heads = [head for one in Priority if (head := self._head(one))]
        return min(heads, key=lambda live: self.rank(live, now_ns), default=None)

    def rank(self, live: Live, now_ns: int) -> tuple[int, int]:
        """Smaller goes first; of requests that run, the largest is preempted first."""
        aged = now_ns - live.arrived_ns >= self._ageing_ns
        return Priority.INTERACTIVE if aged else live.request.priority, live.number

    def _head(self, priority: Priority) -> Live | None:
        heap = self._heaps[priority]
        while heap and heap[0][1] not in self._waiting:
            heapq.heappop(heap)
        return heap[0][1] if heap else None
