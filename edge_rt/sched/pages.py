"""Who holds which page of the key-value cache."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class PagePool:
    """Page numbers 0 to `pages` - 1, each either free or held once.

    The lowest free numbers go out first, so a lightly loaded engine stays in the same few pages.
    """

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._free = list(range(pages))  # a heap, as every sorted list is
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` pages; the caller has seen that they are `free`."""
        assert 0 <= count <= self.free, f"{count} pages asked for, {self.free} are free"
        pages = tuple(heapq.heappop(self._free) for _ in range(count))
        self._held.update(pages)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back; each must be held."""
        for page in pages:
            assert page in self._held, f"page {page} is released, but nobody holds it"
            self._held.remove(page)
            heapq.heappush(self._free, page)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that exactly the pages `held` are out, none of them twice."""
        claimed = sorted(held)
        assert claimed == sorted(self._held), (
            f"owners hold pages {claimed}, the pool has given out {sorted(self._held)}"
        )
        assert sorted([*self._free, *claimed]) == list(range(self._pages)), "a page is lost"
