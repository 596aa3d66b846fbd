"""It ends in time, whatever it is in the middle of."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.broker import broker, listener
from fakes.broker_client import Device, device
from fakes.waiting import eventually

LEFT_S = 5.0  # what `stop` may take


def stop_in_time(box: Device) -> None:
    begun = time.monotonic()
    assert box.publisher.stop()
    assert time.monotonic() - begun < LEFT_S
    assert not box.publisher._thread.is_alive()
    assert box.status.state == "off"


class Silent:
    """Takes connections, or leaves them in the queue of the kernel, and says nothing."""

    def __init__(self, takes: bool) -> None:
        self._server = socket.socket()
        self._server.bind(("127.0.0.1", 0))
        self._server.listen(0 if not takes else 16)
        self.port = int(self._server.getsockname()[1])
        self._fill = []
        if not takes:
            for _ in range(4):
                end = socket.socket()
                end.setblocking(False)
                end.connect_ex(("127.0.0.1", self.port))
                self._fill.append(end)

    def close(self) -> None:
        for end in (self._server, *self._fill):
            end.close()


@contextlib.contextmanager
def silent(takes: bool) -> Iterator[int]:
    made = Silent(takes)
    try:
        yield made.port
    finally:
        made.close()


@pytest.mark.parametrize("takes", [True, False], ids=["no CONNACK", "no TCP"])
def test_stop_and_timeout_while_nobody_answers(takes: bool) -> None:
    """PAHO#809, PAHO#23: stop returns, whatever it is in the middle of."""
    with silent(takes) as port:
        box = Device(port)
        box.publisher.start()
        eventually(lambda: box.status.state == "down")
        assert "in time" in box.status.why
        time.sleep(0.3)
        stop_in_time(box)
        box = Device(port)
        box.publisher.start()
        time.sleep(0.2)
        assert box.status.state == "connecting"
        stop_in_time(box)


def test_stop_while_tls_gets_no_answer() -> None:
    with silent(takes=True) as port:
        box = Device(port, tls=True)
        box.publisher.start()
        time.sleep(0.3)
        stop_in_time(box)
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "mqtt-connect"])


def test_stop_while_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = threading.Event()

    def getaddrinfo(*_: Any) -> list[Any]:
        blocked.wait(20)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    box = Device(1, host="broker.invalid")
    box.publisher.start()
    box.make(3)
    time.sleep(0.3)
    stop_in_time(box)
    blocked.set()


def test_abandoned_opening_never_logs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take over the connection that came after it."""
    slow = threading.Event()
    real = socket.getaddrinfo

    def getaddrinfo(*arguments: Any, **more: Any) -> Any:
        slow.wait(20)
        return real(*arguments, **more)

    with broker(tmp_path) as made:
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        box = Device(made.port, host="localhost")
        box.publisher.start()
        time.sleep(0.2)
        stop_in_time(box)
        slow.set()
        eventually(lambda: not [t for t in threading.enumerate() if t.name == "mqtt-connect"])
        assert "edge_rt-box" not in made.log()


def test_stop_with_a_stopped_broker_keeps_what_is_not_acknowledged(tmp_path: Path) -> None:
    with broker(tmp_path) as made:
        box = Device(made.port, tmp_path / "spool")
        box.publisher.start()
        eventually(lambda: box.status.state == "connected")
        made.pause()
        box.make(100)
        stop_in_time(box)
        made.resume()
        with (
            listener(made.port) as ear,
            device(made.port, tmp_path / "spool"),
        ):
            eventually(lambda: {f["seq"] for f in ear.records("telemetry")} == set(range(1, 101)))


def test_stop_races_start_and_callers() -> None:
    """PAHO#23, PAHO#249: threads that publish while it starts and stops do not block it."""
    for _ in range(20):
        box = Device(1)
        is_over = threading.Event()

        def publish(box: Device = box, is_over: threading.Event = is_over) -> None:
            while not is_over.is_set():
                box.make(5)
                box.publisher.set_state("ready")

        callers = [threading.Thread(target=publish) for _ in range(3)]
        for caller in callers:
            caller.start()
        box.publisher.start()
        stop_in_time(box)
        is_over.set()
        for caller in callers:
            caller.join(10)
            assert not caller.is_alive()
