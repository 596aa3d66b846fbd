"""A real mosquitto with files of its own, and a client that sees all that it forwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import paho.mqtt.client as mqtt
import pytest
from fakes.waiting import HANG_S, eventually, free_port
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions


class Broker:
    """`options` are lines of mosquitto.conf; those of a listener come after its line."""

    def __init__(self, directory: Path, *options: str) -> None:
        found = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
        if found is None:
            pytest.fail("mosquitto is not installed: apt-get install mosquitto", pytrace=False)
        self._binary = found
        self.port = free_port()
        self._file = directory / f"mosquitto-{self.port}.conf"
        self._log = directory / f"mosquitto-{self.port}.log"
        anonymous = [] if any("allow_anonymous" in line for line in options) else [
            "allow_anonymous true"
        ]  # fmt: skip
        self._file.write_text(
            "\n".join(
                [
                    *(["user root"] if os.geteuid() == 0 else []),  # else it cannot read our files
                    "log_type all",
                    "max_queued_messages 0",
                    f"listener {self.port} 127.0.0.1",
                    *anonymous,
                    *options,
                ]
            )
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._binary, "-c", str(self._file)], stdout=log, stderr=log
            )
        eventually(self._listens, f"mosquitto: {self.log()}")

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def reload(self) -> None:
        """Read the files of passwords and ACLs again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


@contextlib.contextmanager
def broker(directory: Path, *options: str) -> Iterator[Broker]:
    made = Broker(directory, *options)
    made.start()
    try:
        yield made
    finally:
        made.kill()


class Heard(NamedTuple):
    topic: str
    payload: bytes
    retain: bool
    correlation: bytes | None

    @property
    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.payload)
        return found


class Listener:
    """Subscribed to everything; with QoS 0, so that its own acknowledgements break nothing."""

    def __init__(self, port: int, username: str | None = None, password: str | None = None) -> None:
        self.heard: list[Heard] = []
        self._connected = threading.Event()
        self._client = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2,
            f"listener-{os.urandom(4).hex()}",
            protocol=mqtt.MQTTv5,
        )
        if username is not None:
            self._client.username_pw_set(username, password)
        self._client.reconnect_delay_set(1, 1)
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = lambda *_: self._connected.set()
        self._client.on_disconnect = lambda *_: self._connected.clear()
        self._client.on_message = self._on_message
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        self.wait()

    def _on_connect(self, client: mqtt.Client, *_: Any) -> None:
        client.subscribe("#", options=SubscribeOptions(qos=0, retainAsPublished=True))

    def _on_message(self, _client: mqtt.Client, _data: Any, message: mqtt.MQTTMessage) -> None:
        correlation = getattr(message.properties, "CorrelationData", None)
        self.heard.append(Heard(message.topic, message.payload, message.retain, correlation))

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    def wait(self) -> None:
        """Until it hears."""
        assert self._connected.wait(HANG_S), "the listener is not connected"

    def on(self, suffix: str) -> list[Heard]:
        """What was heard on a topic with this end, in order."""
        return [heard for heard in list(self.heard) if heard.topic.endswith(suffix)]

    def records(self, topic: str) -> list[dict[str, Any]]:
        return [heard.fields for heard in self.on(f"/{topic}")]

    def states(self) -> list[str]:
        return [fields["state"] for fields in self.records("state")]

    def send(
        self,
        topic: str,
        payload: bytes | str = b"",
        *,
        retain: bool = False,
        response: str | None = None,
        correlation: bytes | None = None,
    ) -> None:
        """Publish with QoS 1, and wait for the broker to have it."""
        properties = Properties(mqtt.PacketTypes.PUBLISH)
        if response is not None:
            properties.ResponseTopic = response
        if correlation is not None:
            properties.CorrelationData = correlation
        sent = self._client.publish(topic, payload, qos=1, retain=retain, properties=properties)
        sent.wait_for_publish(HANG_S)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


@contextlib.contextmanager
def listener(
    port: int, username: str | None = None, password: str | None = None
) -> Iterator[Listener]:
    made = Listener(port, username, password)
    try:
        yield made
    finally:
        made.close()


class Proxy:
    """The network between a client and the broker: can be cut off, or swallow all silently."""

    def __init__(self, to_port: int) -> None:
        self.is_open = self.is_silent = False
        self.accepted = 0
        self._to_port = to_port
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def _spawn(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                self.accepted += 1
                if not self.is_open:
                    client.close()
                    continue
                try:
                    broker_end = socket.create_connection(("127.0.0.1", self._to_port), 5)
                except OSError:
                    client.close()
                    continue
                broker_end.settimeout(None)
                self._pairs.append((client, broker_end))
                for ends in ((client, broker_end), (broker_end, client)):
                    self._spawn(self._pump, *ends)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                while self.is_silent:
                    time.sleep(0.01)
                target.sendall(data)
        _shut(source, target)

    def cut(self) -> None:
        """End all connections, and take no new ones."""
        self.is_open = False
        for pair in self._pairs:
            _shut(*pair)

    def close(self) -> None:
        self.cut()
        self.is_silent = False
        _shut(self._server)  # wakes accept
        for thread in self._threads:
            thread.join(HANG_S)
        for end in (self._server, *(end for pair in self._pairs for end in pair)):
            end.close()


def _shut(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy(to_port: int) -> Iterator[Proxy]:
    made = Proxy(to_port)
    made.is_open = True
    try:
        yield made
    finally:
        made.close()
