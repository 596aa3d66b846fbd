"""Any traffic, and that a scheduler that fails would be seen (invariants: fakes/traffic.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from fakes.traffic import AnyTraffic
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from edge_rt.core import PowerBudget, TokenEvent
from edge_rt.sched.pages import PagePool
from edge_rt.sched.queue import Queue
from edge_rt.sched.rows import Live
from edge_rt.sched.scheduler import Scheduler

TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)

Patch = Callable[[pytest.MonkeyPatch], None]


def drop_a_release(patch: pytest.MonkeyPatch) -> None:
    original = PagePool.release
    patch.setattr(PagePool, "release", lambda pool, pages: original(pool, list(pages)[1:]))


def double_a_free(patch: pytest.MonkeyPatch) -> None:
    original = PagePool.release

    def release(pool: PagePool, pages: Iterable[int]) -> None:
        held = list(pages)
        original(pool, held)
        pool._free += held[:1]

    patch.setattr(PagePool, "release", release)


def skip_ageing(patch: pytest.MonkeyPatch) -> None:
    def rank(queue: Queue, live: Live, now_ns: int) -> tuple[int, int]:
        return live.request.priority, live.number

    patch.setattr(Queue, "rank", rank)


def last_come_first_served(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Queue, "rank", lambda queue, live, now_ns: (0, -live.number))


def end_twice(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._end

    def end(*arguments: Any, **named: Any) -> TokenEvent:
        event = original(*arguments, **named)
        return event._replace(is_last=True)

    patch.setattr(Scheduler, "_end", end)


def forget_the_copies(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._prefilled

    def prefilled(scheduler: Scheduler, *arguments: object) -> list[TokenEvent]:
        events = list(original(scheduler, *arguments))  # type: ignore[arg-type]
        scheduler._copies.clear()
        return events

    patch.setattr(Scheduler, "_prefilled", prefilled)


def lose_a_preempted_request(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._preempt

    def preempt(scheduler: Scheduler, live: Live) -> None:
        original(scheduler, live)
        for row in live.rows:
            row.output.clear()

    patch.setattr(Scheduler, "_preempt", preempt)


def ignore_deadlines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "expire", lambda scheduler, now_ns: [])


def ignore_the_row_budget(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._plan_decode
    patch.setattr(Scheduler, "_plan_decode", lambda s, _budget: original(s, PowerBudget()))


MUTATIONS: list[Patch] = [
    drop_a_release,
    double_a_free,
    skip_ageing,
    last_come_first_served,
    end_twice,
    forget_the_copies,
    lose_a_preempted_request,
    ignore_deadlines,
    ignore_the_row_budget,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_failing_scheduler_is_seen(mutation: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_state_machine_as_test(
            AnyTraffic,
            settings=settings(
                max_examples=400,
                stateful_step_count=50,
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
