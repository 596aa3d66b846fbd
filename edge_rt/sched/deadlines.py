"""When requests are to have ended."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

FEW = 64  # of requests that have ended: not worth a look


class Deadlines:
    """Those of the requests in `alive`, by id, in their order.

    A request that ends in time leaves its own behind, for minutes; once most are such they go.
    """

    def __init__(self, alive: Mapping[str, object]) -> None:
        self._alive = alive
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first_ns(self) -> int | None:
        """The next; its request may have ended."""
        return self._heap[0][0] if self._heap else None

    def add(self, deadline_ns: int, request_id: str) -> None:
        """Of a request that is alive."""
        if len(self._heap) > 2 * len(self._alive) + FEW:
            self._heap = [one for one in self._heap if one[1] in self._alive]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_ns, request_id))

    def passed(self, now_ns: int) -> Iterator[str]:
        """Take out what has passed; the id may be that of another request by now."""
        while self._heap and self._heap[0][0] <= now_ns:
            yield heapq.heappop(self._heap)[1]
