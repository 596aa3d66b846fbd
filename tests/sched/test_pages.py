from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.sched.pages import PagePool


def test_lowest_free_pages_go_out_first() -> None:
    pool = PagePool(6)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.release((2, 0))
    assert pool.allocate(3) == [0, 2, 4]
    assert pool.free == 1


def test_allocating_more_than_is_free_is_an_invariant() -> None:
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="3 pages asked for, 2 are free"):
        pool.allocate(3)


def test_a_double_free_is_caught() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="page 0 is released, but nobody holds it"):
        pool.release(pages)


@pytest.mark.parametrize("held", [(), (0,), (0, 0, 1), (0, 1, 2), (0, 2)])
def test_integrity_names_a_leak_a_second_owner_and_a_stranger(held: tuple[int, ...]) -> None:
    pool = PagePool(4)
    pool.allocate(2)
    pool.check_integrity((1, 0))
    with pytest.raises(AssertionError):
        pool.check_integrity(held)


def test_a_shared_page_is_free_when_its_last_holder_has_released_it() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.check_integrity([0, 0])
    pool.release(pages)
    assert pool.free == 1
    pool.release(pages)
    assert pool.free == 2
    with pytest.raises(AssertionError, match="page 0 is shared, but nobody holds it"):
        pool.share(pages)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_no_page_is_ever_held_twice_or_lost(sizes: list[int]) -> None:
    pool = PagePool(10)
    owners: list[list[int]] = []
    for size in sizes:
        if size > pool.free:
            pool.release(owners.pop(size % len(owners)))
        else:
            owners.append(pool.allocate(size))
        held = [page for pages in owners for page in pages]
        pool.check_integrity(held)
        assert pool.free == 10 - len(held)
