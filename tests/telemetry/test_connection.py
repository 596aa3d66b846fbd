"""Connections that fail, end, or are taken: what the status says, and how often it is tried."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from fakes.broker import Broker, broker, listener, proxy
from fakes.broker_client import QUICK, device
from fakes.broker_scripted import CONNACK, scripted
from fakes.waiting import eventually

from edge_rt.telemetry.backoff import Backoff, Delays
from edge_rt.telemetry.last_words import last_words
from edge_rt.telemetry.publisher import Duties


def test_two_devices_with_one_id_do_not_flap(tmp_path: Path) -> None:
    """frigate#3280, with a broker (mosquitto 2.0.11) that closes the older one without a word."""
    events: list[str] = []
    duties = Duties(on_event=lambda name, fields: events.append(f"{name} {fields['client_id']}"))
    with (
        broker(tmp_path) as made,
        device(made.port, client_id="same", device="one", duties=duties) as first,
        device(made.port, client_id="same", device="two", duties=duties) as second,
    ):
        both = (first, second)
        eventually(lambda: [box for box in both if box.status.state == "taken-over"])
        assert events == ["mqtt-taken-over same"]
        assert {box.status.state for box in both} == {"taken-over", "connected"}
        logins = made.log().count("as same")
        assert logins <= 6, "three for each"
        time.sleep(1.5)
        assert made.log().count("as same") == logins, "one waits, the other is left alone"


def test_takeover_that_the_broker_tells_is_seen_at_once_and_waits() -> None:
    """frigate#3280: DISCONNECT with reason 142, as the standard has it."""
    events: list[float] = []
    duties = Duties(on_event=lambda _name, fields: events.append(fields["retry_s"]))
    with scripted(CONNACK, b"\xe0\x02\x8e\x00") as made, device(made.port, duties=duties) as box:
        eventually(lambda: box.status.state == "taken-over")
        assert "Session taken over" in box.status.why
        eventually(lambda: len(made.logins) == 2)
        assert made.logins[1] - made.logins[0] >= 2.0
        eventually(lambda: len(events) == 2)
        assert 2 <= events[0] <= 3
        assert 4 <= events[1] <= 6, "a short success is none"


@pytest.mark.parametrize(
    ("connack", "why"),
    [
        (b"\x20\x05\x00\x00\x02\x24\x00", "QoS 1"),  # Maximum QoS 0
        (b"\x20\x02\x00\x01", "MQTT 5"),  # of MQTT 3.1.1: unacceptable version
        (b"\x20\x03\x00\x88\x00", "Server unavailable"),
        (b"\x20\x03\x00\x2f\x00", "what it sent is not MQTT 5"),  # there is no reason 47
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, "did not answer CONNECT"),
    ],
)
def test_broker_that_will_not_do_is_named(connack: bytes, why: str) -> None:
    with scripted(connack) as made, device(made.port) as box:
        eventually(lambda: box.status.state == "down")
        assert why in box.status.why


def test_last_words_of_a_broker_are_heard_though_a_write_failed() -> None:
    """Its DISCONNECT and PUBACKs are in the kernel when the write finds the connection closed."""
    words = b"\x40\x02\x00\x07\xd0\x00\x40\x04\x00\x08\x87\x00\xe0\x02\x8e\x00\x40"
    ours, broker_end = socket.socketpair()
    with ours, broker_end:
        broker_end.sendall(words)
        broker_end.close()
        found = list(last_words(ours))
    assert [(each.code.value, each.mid) for each in found] == [(0, 7), (0x87, 8), (0x8E, None)]
    for odd in (b"", b"\x40", b"\x40\x05\x00", b"\x40\x03\x00\x01\x01", b"\x40\xff" + bytes(300)):
        ours, broker_end = socket.socketpair()
        with ours, broker_end:
            broker_end.sendall(odd)
            assert list(last_words(ours)) == []


@pytest.mark.slow
def test_broker_that_answers_pings_but_acknowledges_nothing_is_left() -> None:
    with scripted(CONNACK) as made, device(made.port, is_impatient=True) as box:
        eventually(lambda: box.status.state == "connected")
        eventually(lambda: box.status.state == "down")
        assert "acknowledged nothing for 4 s" in box.status.why


def test_connection_that_is_cut_comes_back_and_says_so_again(tmp_path: Path) -> None:
    """zigbee2mqtt#13382: after a restart of the broker, state and birth are there again."""
    made = Broker(tmp_path)
    made.start()
    try:
        with device(made.port) as box:
            box.publisher.set_state("ready")
            eventually(lambda: box.status.state == "connected")
            made.kill()
            eventually(lambda: box.status.state == "down")
            made.start()  # without persistence: nothing is retained any more
            with listener(made.port) as ear:
                eventually(lambda: ear.states()[-1:] == ["ready"])
                eventually(lambda: ear.on("/info"))
            assert box.status.reconnects == 1
    finally:
        made.kill()


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_cable_pull_is_noticed(tmp_path: Path, is_busy: bool) -> None:
    """PAHO#552, PAHO#432: nothing is closed, nothing answers; twice the keep-alive ends it."""
    with (
        broker(tmp_path) as made,
        proxy(made.port) as network,
        device(network.port, is_impatient=True) as box,
    ):
        eventually(lambda: box.status.state == "connected")
        network.is_silent = True
        if is_busy:
            box.make(30)
        eventually(lambda: box.status.state == "down", within_s=40)
        network.cut()
        network.is_silent, network.is_open = False, True
        eventually(lambda: box.status.state == "connected")
        eventually(lambda: box.status.spool_records == 0)


def test_session_is_not_the_brokers() -> None:
    """PAHO#877, PAHO#542: clean start and no expiry; the spool alone remembers."""
    with scripted(CONNACK, b"\xe0\x00") as made, device(made.port):
        eventually(lambda: len(made.connects) >= 3)
    for connect in made.connects:
        assert connect[:7] == b"\x00\x04MQTT\x05"
        assert connect[7] & 0x02, "clean start"
        assert b"\x11\x00\x00\x00\x00" in connect, "session expiry 0"


def test_backoff_doubles_up_to_its_limit_and_is_spread() -> None:
    full, distant = Backoff(Delays(1, 60)), Backoff(Delays(30, 300, 1.0, 1.5))
    limits = [1, 2, 4, 8, 16, 32, 60, 60]
    waits = [full.next_s() for _ in limits]
    assert all(0 <= wait <= limit for wait, limit in zip(waits, limits, strict=True))
    assert len({wait / limit for wait, limit in zip(waits, limits, strict=True)}) == len(limits)
    assert all(limit <= distant.next_s() <= 1.5 * limit for limit in (30, 60, 120, 240, 300, 300))
    full.reset()
    assert full.next_s() <= 1
    many = Backoff(Delays(1, 60))
    assert max(many.next_s() for _ in range(5000)) <= 60


def test_quick_connections_do_not_reset_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that accepts and then ends the connection is not tried at full speed."""
    monkeypatch.setattr("edge_rt.telemetry.link.CUTS", 99)
    timing = QUICK._replace(lost=Delays(0.2, 60.0, 1.0, 1.0))
    with (
        broker(tmp_path) as made,
        proxy(made.port) as network,
        device(network.port, timing=timing) as box,
    ):
        begun = time.monotonic()
        while time.monotonic() - begun < 3.0:
            if box.status.state == "connected":
                network.cut()
                network.is_open = True
            time.sleep(0.01)
        assert network.accepted <= 6, "0.2, 0.4, 0.8, 1.6 s between them"
