"""The spool against a list in memory, over random histories with kills and a failing disk."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.spool import MIB, FailingStore, as_killed, files_bytes, record
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from edge_rt.telemetry.record import Record
from edge_rt.telemetry.spool import Spool

WINDOW = 20


@dataclass
class Entry:
    record: Record
    state: str = "new"  # old, taken, acknowledged
    stored: bool = False


class SpoolMachine(RuleBasedStateMachine):
    """Either the disk fails, or records are so large that the cap drops some."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.entries: list[Entry] = []
        self.seq = self.kills = self.dropped = 0
        self.faulty = False
        FailingStore.fails = ""

    @initialize(large=st.booleans())
    def start(self, large: bool) -> None:
        self.large = large
        self.path = self.directory / "spool.sqlite"
        self.spool = Spool(self.path, MIB)

    def teardown(self) -> None:
        FailingStore.fails = ""
        if hasattr(self, "spool"):
            self.spool.close()
        shutil.rmtree(self.directory)

    @rule(count=st.integers(1, 6), size=st.integers(8, 20_000))
    def put(self, count: int, size: int) -> None:
        # Beyond the limit of memory, `put` would commit or drop: that has a test of its own.
        if sum(len(each.record.payload) + 600 for each in self._those(stored=False)) > 120_000:
            return
        for _ in range(count):
            self.seq += 1
            each = record(self.seq, size if self.large else 8 + size % 200)
            self.spool.put(each)
            self.entries.append(Entry(each))

    @rule(limit=st.integers(0, 8))
    def take_new(self, limit: int) -> None:
        limit = min(limit, WINDOW - self.spool.unsettled)
        self._take(self.spool.take_new(limit), self._those("new")[: max(0, limit)])

    @rule(limit=st.integers(0, 12))
    def take_backlog(self, limit: int) -> None:
        limit = min(limit, WINDOW - self.spool.unsettled)
        there = [each for each in self._those("old") if not (self.faulty and each.stored)]
        self._take(self.spool.take_backlog(limit), there[: max(0, limit)])

    @rule(data=st.data(), count=st.integers(1, 12))
    def acknowledge(self, data: st.DataObject, count: int) -> None:
        taken = self._those("taken")
        chosen = data.draw(st.permutations(taken))[:count] if taken else []
        for each in chosen:
            self.spool.acknowledge(each.record.key)
            each.state = "acknowledged"
        self.entries = [e for e in self.entries if e.stored or e.state != "acknowledged"]

    @rule(data=st.data())
    def acknowledge_what_is_not_taken(self, data: st.DataObject) -> None:
        others = [*self._those("new"), *self._those("old"), *self._those("acknowledged")]
        if others:
            self.spool.acknowledge(data.draw(st.sampled_from(others)).record.key)

    @rule()
    def release(self) -> None:
        self.spool.release()
        for each in self.entries:
            if each.state != "acknowledged":
                each.state = "old"

    @rule()
    def commit(self) -> None:
        self.spool._retry_at_s = 0
        self.spool.commit()
        self._committed()

    @precondition(lambda self: not self.faulty)
    @rule()
    def reopen(self) -> None:
        FailingStore.fails = ""
        self.spool.close()
        self._committed()
        self.spool = Spool(self.path, MIB)
        assert self.spool.fault == self.spool.note == ""
        self._restarted()

    @precondition(lambda self: not self.faulty)
    @rule()
    def kill(self) -> None:
        FailingStore.fails = ""
        self.kills += 1
        self.path = as_killed(self.path, self.directory / str(self.kills))
        self.spool._store.close()  # type: ignore[union-attr]
        self.spool = Spool(self.path, MIB)
        assert self.spool.fault == self.spool.note == ""
        self.entries = self._those(stored=True)
        self._restarted()

    @precondition(lambda self: not self.large)
    @rule(fails=st.sampled_from(["", "before", "after"]))
    def disk(self, fails: str) -> None:
        FailingStore.fails = fails if not self.faulty or not fails else "before"

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "spool"):
            return
        waiting = [each for each in self.entries if each.state != "acknowledged"]
        assert self.spool.records == len(waiting)
        assert self.spool.bytes == sum(len(each.record.payload) for each in self.entries)
        assert self.spool.dropped == self.dropped
        unsettled = len(self._those("taken"))
        if not self.faulty:
            unsettled += len(self._those("acknowledged"))
        assert self.spool.unsettled == unsettled
        assert files_bytes(self.path) <= MIB

    def _those(self, state: str | None = None, stored: bool | None = None) -> list[Entry]:
        return [
            each
            for each in self.entries
            if (state is None or each.state == state) and (stored is None or each.stored == stored)
        ]

    def _take(self, taken: list[Record], expected: list[Entry]) -> None:
        assert taken == [each.record for each in expected]
        for each in expected:
            each.state = "taken"

    def _committed(self) -> None:
        for each in self._those("new"):
            each.state = "old"
        work = self._those("acknowledged") or self._those(stored=False)
        was_faulty, self.faulty = self.faulty, self.spool.fault != ""
        assert self.faulty == (FailingStore.fails != "" and (bool(work) or was_faulty))
        if self.faulty:
            return
        full_bytes = sum(len(each.record.payload) for each in self.entries)
        self.entries = [each for each in self.entries if each.state != "acknowledged"]
        for each in self.entries:
            each.stored = True
        lost = self.spool.dropped - self.dropped
        assert lost == 0 or full_bytes > MIB // 2
        by_age = sorted(self.entries, key=lambda each: each.state == "taken")
        self.entries = sorted(by_age[lost:], key=lambda each: each.record.key.seq)
        self.dropped += lost

    def _restarted(self) -> None:
        for each in self.entries:
            each.state = "old"


def run(monkeypatch: pytest.MonkeyPatch, examples: int) -> None:
    monkeypatch.setattr("edge_rt.telemetry.spool.Store", FailingStore)
    run_state_machine_as_test(
        SpoolMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def test_spool_is_what_a_list_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, 30)


@pytest.mark.slow
def test_spool_is_what_a_list_would_be_at_length(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, 300)
