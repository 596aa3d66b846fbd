"""Against a real mosquitto: what arrives, in what order, and what a late subscriber sees."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.broker import Broker, Listener, broker, listener
from fakes.broker_client import Device, device, started
from fakes.waiting import eventually

from edge_rt.telemetry import publisher as publisher_module
from edge_rt.telemetry.publisher import Duties


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Broker]:
    with broker(tmp_path) as found:
        yield found


@pytest.fixture
def ear(mosquitto: Broker) -> Iterator[Listener]:
    with listener(mosquitto.port) as found:
        yield found


def seqs(ear: Listener, topic: str = "telemetry") -> list[int]:
    return [fields["seq"] for fields in ear.records(topic)]


def test_birth_comes_first_and_records_after_it(mosquitto: Broker, ear: Listener) -> None:
    box = Device(mosquitto.port)
    box.make(3)
    with started(box):
        box.publisher.set_state("ready")
        eventually(lambda: ear.states()[-1:] == ["ready"])
        eventually(lambda: len(seqs(ear)) == 3)
    topics = [heard.topic for heard in ear.heard]
    assert topics[:2] == ["edge_rt/box/state", "edge_rt/box/info"]
    info = ear.on("/info")[0]
    assert info.retain
    assert info.fields["version"] == "1"
    assert info.fields["boot_id"] == box.recorder.boot_id
    assert not any(heard.retain for heard in ear.on("/telemetry"))
    assert seqs(ear) == [1, 2, 3]


def test_live_records_are_not_historical(mosquitto: Broker, ear: Listener) -> None:
    with device(mosquitto.port) as box:
        eventually(lambda: box.status.state == "connected")
        box.make(40)
        eventually(lambda: len(seqs(ear)) == 40)
        eventually(lambda: box.status.published_records == 40)
    assert seqs(ear) == list(range(1, 41))
    assert {fields["historical"] for fields in ear.records("telemetry")} == {False}


def test_a_daemon_that_failed_is_offline_for_that(mosquitto: Broker, ear: Listener) -> None:
    with device(mosquitto.port) as box:
        box.publisher.set_state("failed")
        eventually(lambda: "failed" in ear.states())
    eventually(lambda: ear.states()[-1] == "offline")
    assert ear.records("state")[-1]["reason"] == "failed"


def test_late_subscriber_sees_the_state_and_stop_is_offline(
    mosquitto: Broker, ear: Listener
) -> None:
    with device(mosquitto.port) as box:
        box.publisher.set_state("ready")
        eventually(lambda: "ready" in ear.states())
        with listener(mosquitto.port) as late:
            eventually(lambda: late.states() == ["ready"])
            assert late.on("/state")[0].retain
        box.make(5)
    assert ear.states()[-1] == "offline"
    assert ear.records("state")[-1]["reason"] == "stopped"
    assert seqs(ear) == [1, 2, 3, 4, 5], "what was handed over before stop is sent"
    assert box.status.state == "off"
    with listener(mosquitto.port) as late:
        eventually(lambda: late.states() == ["offline"])


def test_killed_process_is_offline_by_its_will(
    mosquitto: Broker, ear: Listener, tmp_path: Path
) -> None:
    code = f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        from fakes.broker_client import Device
        box = Device({mosquitto.port})
        box.publisher.start()
        box.publisher.set_state("ready")
        time.sleep(60)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        eventually(lambda: "ready" in ear.states())
    finally:
        child.kill()
        child.wait()
    eventually(lambda: ear.states()[-1] == "offline")
    last = ear.on("/state")[-1]
    assert last.retain
    assert last.fields["reason"] == "connection lost"
    assert "time_ms" not in last.fields, "nobody knows it when the will is made"


def test_outage_from_the_start_is_replayed_as_historical(tmp_path: Path) -> None:
    made = Broker(tmp_path)
    with device(made.port, tmp_path / "spool", spool_commit_s=0.2) as box:
        box.make(50)
        eventually(lambda: box.status.state == "down" and box.status.spool_records == 50)
        assert "refused" in box.status.why.lower()
        made.start()
        try:
            with listener(made.port) as ear:
                eventually(lambda: box.status.state == "connected")
                eventually(lambda: box.status.spool_records == 0)
                box.make(1)
                eventually(lambda: 51 in seqs(ear))
                eventually(lambda: set(seqs(ear)) == set(range(1, 52)))
                assert [f["historical"] for f in ear.records("telemetry") if f["seq"] == 51] == [
                    False
                ]
                assert all(f["historical"] for f in ear.records("telemetry") if f["seq"] < 51)
        finally:
            made.kill()


def test_discovery_is_announced_and_again_when_home_assistant_returns(
    mosquitto: Broker, ear: Listener
) -> None:
    duties = Duties(retained=lambda: [("homeassistant/device/box/config", '{"a":1}')])
    with device(mosquitto.port, duties=duties, home_assistant=True):
        eventually(lambda: len(ear.on("/config")) == 1)
        assert ear.on("/config")[0].retain
        ear.send("homeassistant/status", "offline")
        ear.send("homeassistant/status", "online")
        eventually(lambda: len(ear.on("/config")) == 2)


def test_home_assistant_is_not_listened_to_without_the_setting(
    mosquitto: Broker, ear: Listener
) -> None:
    with device(mosquitto.port) as box:
        eventually(lambda: box.status.state == "connected")
        eventually(lambda: ear.on("/info"))
    assert "SUBSCRIBE from edge_rt-box" not in mosquitto.log()


def test_wall_clock_may_jump(
    mosquitto: Broker, ear: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device(mosquitto.port) as box:
        eventually(lambda: box.status.state == "connected")
        box.make(5)
        eventually(lambda: len(seqs(ear)) == 5)
        now_ns = time.time_ns()
        for hours in (-30 * 24, 10 * 365 * 24):
            monkeypatch.setattr(time, "time_ns", lambda at=now_ns + hours * 3600 * 10**9: at)
            monkeypatch.setattr(time, "time", lambda at=now_ns / 1e9 + hours * 3600: at)
            box.make(5)
        eventually(lambda: len(seqs(ear)) == 15)
        assert box.status.state == "connected"
        assert box.status.reconnects == 0
    assert seqs(ear) == list(range(1, 16)), "numbers tell the order, times need not"
    times = [fields["time_ms"] for fields in ear.records("telemetry")]
    assert times[5] < times[4] < times[10]


def test_fault_of_ours_costs_the_connection_and_not_the_thread(
    mosquitto: Broker, ear: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "FAULT_S", 0.05)
    faults = iter([RuntimeError("one"), RuntimeError("two")])

    def info() -> dict[str, str]:
        for fault in faults:
            raise fault
        return {"version": "2"}

    with device(mosquitto.port, duties=Duties(info=info)) as box:
        box.make(3)
        eventually(lambda: [f for f in ear.records("info") if f["version"] == "2"])
        eventually(lambda: set(seqs(ear)) == {1, 2, 3})
        assert box.status.state == "connected"


def test_callers_are_not_reached_by_a_spool_that_cannot_be_made(mosquitto: Broker) -> None:
    box = Device(mosquitto.port)

    def fail() -> None:
        raise OSError("no")

    box.publisher._worker._make_spool = fail  # type: ignore[assignment]
    box.publisher.start()
    eventually(lambda: box.status.state == "down")
    assert "OSError('no')" in box.status.why
    box.make(10)
    box.publisher.set_state("ready")
    assert box.publisher.stop()


def test_handing_over_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """PAHO#856, PAHO#857: the oldest go, not the newest, and it shows."""
    monkeypatch.setattr("edge_rt.telemetry.mailbox.MAX_RECORDS", 10)
    box = Device(1)
    box.make(15)
    mailbox = box.publisher._mailbox
    assert [record.key.seq for record in mailbox.take_records()] == list(range(6, 16))
    assert mailbox.dropped == 5
    assert box.publisher.stop()


def test_what_is_handed_over_wakes_the_thread(
    mosquitto: Broker, ear: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "TICK_S", 600.0)
    with device(mosquitto.port, spool_commit_s=600.0) as box:
        eventually(lambda: box.status.state == "connected")
        eventually(lambda: ear.on("/info"))
        time.sleep(0.5)
        box.make(1)
        eventually(lambda: seqs(ear) == [1])
        time.sleep(0.5)
        box.publisher.set_state("ready")
        eventually(lambda: ear.states()[-1] == "ready")


def test_idle_thread_rarely_wakes(mosquitto: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    with device(mosquitto.port) as box:
        eventually(lambda: box.status.state == "connected")
        time.sleep(0.5)
        steps = 0
        step = box.publisher._worker._step

        def counted(now_s: float, is_readable: bool) -> bool:
            nonlocal steps
            steps += 1
            return step(now_s, is_readable)

        monkeypatch.setattr(box.publisher._worker, "_step", counted)
        time.sleep(2)
        assert steps <= 4
