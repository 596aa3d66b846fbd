"""Deadlines pass in their order, and are no more than the requests that live."""

from __future__ import annotations

from edge_rt.sched.deadlines import FEW, Deadlines


def test_they_pass_in_their_order() -> None:
    alive = {"a": 1, "b": 1, "c": 1}
    deadlines = Deadlines(alive)
    for deadline_ns, name in ((30, "a"), (10, "b"), (20, "c")):
        deadlines.add(deadline_ns, name)
    assert deadlines.first_ns == 10
    assert list(deadlines.passed(9)) == []
    assert list(deadlines.passed(20)) == ["b", "c"]
    assert deadlines.first_ns == 30


def test_those_of_ended_requests_are_forgotten() -> None:
    alive: dict[str, int] = {"long": 1}
    deadlines = Deadlines(alive)
    deadlines.add(5, "long")
    for number in range(10_000):
        alive[f"{number}"] = 1
        deadlines.add(1_000_000 - number, f"{number}")
        del alive[f"{number}"]
        assert len(deadlines) <= 2 * (len(alive) + 1) + FEW + 1
    assert "long" in list(deadlines.passed(5))
