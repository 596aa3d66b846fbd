"""What is published when."""

from __future__ import annotations

import json
from typing import Any

from edge_rt.core import BoardInfo, BoardReading
from edge_rt.telemetry.metrics import Metrics
from edge_rt.telemetry.record import Record, Recorder
from edge_rt.telemetry.reporter import Reporter
from edge_rt.telemetry.sources import Sources
from edge_rt.telemetry.status import LinkStatus


class Machine:
    """A daemon whose board and link the test sets."""

    def __init__(self) -> None:
        self.reading = BoardReading(0)
        self.link = LinkStatus()
        self.published: list[Record] = []
        self.recorder = Recorder()
        sources = Sources(
            Metrics(),
            "demo",
            ("ready",),
            lambda: "ready",
            board=lambda: (BoardInfo("jetson"), self.reading),
            link=lambda: self.link,
        )
        self.reporter = Reporter(sources, self.recorder, self.published.append)

    def tick(self) -> list[dict[str, Any]]:
        """The events of a tick."""
        self.published.clear()
        self.reporter.tick()
        assert self.published[0].key.topic == "telemetry"
        assert all(record.key.topic == "event" for record in self.published[1:])
        return [json.loads(record.payload) for record in self.published[1:]]


def events(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what every record has."""
    head = {"schema_version", "time_ms", "boot_id", "seq"}
    return [{k: v for k, v in one.items() if k not in head} for one in found]


def test_records_are_numbered_in_each_topic() -> None:
    machine = Machine()
    machine.reporter.event("started")
    for _ in range(3):
        machine.reporter.tick()
    machine.reporter.bench({"scenario": "offline"})
    machine.reporter.event("stopped", "told to")
    keys = [(record.key.topic, record.key.seq) for record in machine.published]
    assert keys == [
        ("event", 1),
        ("telemetry", 1),
        ("telemetry", 2),
        ("telemetry", 3),
        ("bench", 1),
        ("event", 2),
    ]
    assert {record.key.boot_id for record in machine.published} == {machine.recorder.boot_id}
    last = json.loads(machine.published[-1].payload)
    assert last["seq"] == 2
    assert last["boot_id"] == machine.recorder.boot_id
    assert (last["event"], last["message"]) == ("stopped", "told to")
    assert Recorder().boot_id != machine.recorder.boot_id


def test_sensors_come_and_go() -> None:
    machine = Machine()
    assert machine.tick() == []
    machine.reading = BoardReading(0, lost={"emc": "permission denied", "power": "no rail"})
    assert events(machine.tick()) == [
        {"event": "sensor-lost", "sensor": "emc", "message": "permission denied"},
        {"event": "sensor-lost", "sensor": "power", "message": "no rail"},
    ]
    machine.reading = BoardReading(0, lost={"emc": "input/output error"})
    assert events(machine.tick()) == [{"event": "sensor-back", "sensor": "power"}]


def test_throttles_are_told_once() -> None:
    machine = Machine()
    machine.reading = BoardReading(0, throttles={"oc1": 0, "oc3": 2})
    assert events(machine.tick()) == [{"event": "throttled", "reason": "oc3", "count": 2}]
    assert machine.tick() == []
    machine.reading = BoardReading(0, throttles={"oc1": 1, "oc3": 5})
    assert events(machine.tick()) == [
        {"event": "throttled", "reason": "oc1", "count": 1},
        {"event": "throttled", "reason": "oc3", "count": 3},
    ]


def test_what_is_dropped_is_told() -> None:
    machine = Machine()
    machine.link = LinkStatus("down", dropped_records=0)
    assert machine.tick() == []
    machine.link = LinkStatus("down", dropped_records=4, spool_fault="disk full")
    assert events(machine.tick()) == [
        {"event": "records-dropped", "count": 4},
        {"event": "spool-fault", "message": "disk full"},
    ]
    assert machine.tick() == []


def test_what_earlier_runs_dropped_is_not_told_again() -> None:
    machine = Machine()
    assert machine.tick() == []  # the spool is not open yet
    machine.link = LinkStatus("down", dropped_records=2314, dropped_before=2314)
    assert machine.tick() == []
    machine.link = LinkStatus("down", dropped_records=2320, dropped_before=2314)
    assert events(machine.tick()) == [{"event": "records-dropped", "count": 6}]
