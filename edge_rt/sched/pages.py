"""Who holds which page of the key-value cache."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable


class PagePool:
    """Page numbers 0 to `pages` - 1, each free or held by one row or, where rows share, by several.

    The lowest free numbers go out first, so a lightly loaded engine stays in the same few pages.
    """

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._free = list(range(pages))  # a heap, as every sorted list is
        self._holders: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller has seen that they are `free`."""
        assert 0 <= count <= self.free, f"{count} pages asked for, {self.free} are free"
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Count one more holder of each page."""
        for page in pages:
            assert page in self._holders, f"page {page} is shared, but nobody holds it"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Give up pages that one holder has; a page is free when its last holder has."""
        for page in pages:
            assert page in self._holders, f"page {page} is released, but nobody holds it"
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                heapq.heappush(self._free, page)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that exactly the pages `held` are out, each as often as it stands there."""
        claimed = Counter(held)
        assert claimed == self._holders, (
            f"owners hold pages {dict(claimed)}, the pool has given out {self._holders}"
        )
        assert sorted([*self._free, *claimed]) == list(range(self._pages)), "a page is lost"
