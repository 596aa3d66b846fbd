"""tools/fleet's broker: the shipped configuration, ACL and certificates, with a real mosquitto."""

from __future__ import annotations

import contextlib
import getpass
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest
from fakes.promtool import program
from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

FLEET = Path(__file__).parents[2] / "tools/fleet"
NAMES = ("dev-1", "dev-2", "operator", "telegraf", "homeassistant")
PASSWORD = "correct horse"  # noqa: S105
DEADLINE_S = 30.0
CONNECT = b"\x10\x10\x00\x04MQTT\x05\x02\x00\x1e\x00\x00\x03abc"
REFUSED = 0x87  # PUBACK, CONNACK: not authorized


class Broker:
    """The shipped configuration with its paths and ports replaced."""

    def __init__(self, directory: Path) -> None:
        self.certs = directory / "certs"
        make = [FLEET / "make-certs", self.certs, "localhost", *NAMES]
        subprocess.run(make, check=True, capture_output=True, timeout=60)
        self.cert_port, self.password_port = free_ports()
        passwords = directory / "passwd"
        passwords.touch(0o600)
        for name in NAMES:
            command = [program("mosquitto_passwd", "mosquitto"), "-b", passwords, name, PASSWORD]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        text = (FLEET / "mosquitto.conf").read_text(encoding="utf-8")
        for shipped, here in (
            ("user mosquitto\n", f"user {getpass.getuser()}\n"),
            ("/etc/mosquitto/certs", str(self.certs)),
            ("/etc/mosquitto/acl", str(FLEET / "acl")),
            ("/etc/mosquitto/passwd", str(passwords)),
            ("/var/lib/mosquitto/", f"{directory}/"),
            ("listener 8883\n", f"listener {self.cert_port} localhost\n"),
            ("listener 8884\n", f"listener {self.password_port} localhost\n"),
        ):
            assert shipped in text
            text = text.replace(shipped, here)
        file = directory / "mosquitto.conf"
        file.write_text(text, encoding="utf-8")
        self._log = (directory / "log").open("w+")
        program_path = program("mosquitto", "mosquitto")
        self._process = subprocess.Popen([program_path, "-c", file], stderr=self._log)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        for port in (self.cert_port, self.password_port):
            while True:
                try:
                    socket.create_connection(("localhost", port), 1).close()
                    break
                except OSError:
                    assert self._process.poll() is None, self.log()
                    assert time.monotonic() < deadline, self.log()
                    time.sleep(0.05)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_S)
        self._log.close()


def free_ports() -> tuple[int, int]:
    with (
        socket.create_server(("localhost", 0)) as one,
        socket.create_server(("localhost", 0)) as two,
    ):
        return one.getsockname()[1], two.getsockname()[1]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    found = Broker(tmp_path_factory.mktemp("broker"))
    yield found
    found.stop()


class Peer:
    """A client that says what it was answered."""

    def __init__(
        self,
        broker: Broker,
        certificate: str | None = None,
        username: str | None = None,
        password: str | None = None,
        client_id: str = "",
    ) -> None:
        self._answers: Queue[int] = Queue()
        self._received: Queue[tuple[str, bytes]] = Queue()
        self.ended: Queue[int] = Queue()
        self._client = client = Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            protocol=MQTTProtocolVersion.MQTTv5,
            reconnect_on_failure=False,
        )
        context = ssl.create_default_context(cafile=broker.certs / "ca.crt")
        if certificate is not None:
            files = broker.certs / f"{certificate}.crt", broker.certs / f"{certificate}.key"
            context.load_cert_chain(*files)
        client.tls_set_context(context)
        if username is not None:
            client.username_pw_set(username, password)
        client.on_connect, client.on_disconnect = self._on_connect, self._on_disconnect
        client.on_publish, client.on_subscribe = self._on_publish, self._on_subscribe
        client.on_message = self._on_message
        port = broker.password_port if certificate is None else broker.cert_port
        client.connect("localhost", port)
        client.loop_start()
        try:
            self.connected = self._answers.get(timeout=DEADLINE_S)
        except BaseException:
            self.close()
            raise

    def publish(self, topic: str, payload: str = "x") -> int:
        """The PUBACK's reason code."""
        self._client.publish(topic, payload, qos=1)
        return self._answers.get(timeout=DEADLINE_S)

    def subscribe(self, topic: str) -> None:
        self._client.subscribe(topic, qos=1)
        self._answers.get(timeout=DEADLINE_S)

    def next(self) -> tuple[str, bytes]:
        return self._received.get(timeout=DEADLINE_S)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_connect(
        self, _c: Client, _d: object, _f: ConnectFlags, code: ReasonCode, _p: Properties
    ) -> None:
        self._answers.put(code.value)

    def _on_disconnect(
        self, _c: Client, _d: object, _f: DisconnectFlags, code: ReasonCode, _p: Properties
    ) -> None:
        self.ended.put(code.value)

    def _on_publish(
        self, _c: Client, _d: object, _m: int, code: ReasonCode, _p: Properties
    ) -> None:
        self._answers.put(code.value)

    def _on_subscribe(
        self, _c: Client, _d: object, _m: int, codes: list[ReasonCode], _p: Properties
    ) -> None:
        self._answers.put(codes[0].value)

    def _on_message(self, _c: Client, _d: object, message: MQTTMessage) -> None:
        self._received.put((message.topic, message.payload))


def accepts(peer: Peer, topic: str) -> bool:
    """Whether the broker takes a message; 0x10 is one that nobody has subscribed to."""
    code = peer.publish(topic)
    assert code in {0, 0x10, REFUSED}
    return code != REFUSED


OWN = ("state", "info", "telemetry", "bench", "event", "reply/1")


@pytest.mark.parametrize(
    "login", [{"certificate": "dev-1"}, {"username": "dev-1", "password": PASSWORD}]
)
def test_a_device_writes_its_own_topics_and_no_others(
    broker: Broker, login: dict[str, str]
) -> None:
    with Peer(broker, **login) as device:
        assert device.connected == 0
        assert all(accepts(device, f"edge_rt/dev-1/{kind}") for kind in OWN)
        assert accepts(device, "homeassistant/device/edge_rt-dev-1/config")
        for topic in (
            *(f"edge_rt/dev-2/{kind}" for kind in OWN),
            "edge_rt/dev-1/cmd/drain",
            "edge_rt/dev-2/cmd/drain",
            "edge_rt/dev-1",
            "homeassistant/device/edge_rt-dev-2/config",
            "homeassistant/status",
            "other/dev-1/state",
        ):
            assert not accepts(device, topic), topic


def test_an_operator_reads_all_and_gives_commands(broker: Broker) -> None:
    with (
        Peer(broker, username="operator", password=PASSWORD) as operator,
        Peer(broker, "dev-1") as one,
        Peer(broker, "dev-2") as two,
    ):
        for peer in (operator, one, two):
            peer.subscribe("#")
        two.publish("edge_rt/dev-2/telemetry", "from two")
        assert operator.next() == ("edge_rt/dev-2/telemetry", b"from two")
        assert accepts(operator, "edge_rt/dev-2/cmd/drain")
        assert accepts(operator, "edge_rt/dev-1/cmd/drain")
        # What a device sees first is its own command: no figures and no commands of others.
        assert one.next() == ("edge_rt/dev-1/cmd/drain", b"x")
        assert two.next() == ("edge_rt/dev-2/cmd/drain", b"x")
        assert not accepts(operator, "edge_rt/dev-1/telemetry")


@pytest.mark.parametrize("reader", ["telegraf", "homeassistant"])
def test_who_only_reads_gives_no_commands(broker: Broker, reader: str) -> None:
    with Peer(broker, reader) as peer, Peer(broker, "dev-1") as device:
        peer.subscribe("edge_rt/#")
        device.publish("edge_rt/dev-1/telemetry", "figures")
        assert peer.next() == ("edge_rt/dev-1/telemetry", b"figures")
        assert not accepts(peer, "edge_rt/dev-1/cmd/drain")
        assert not accepts(peer, "edge_rt/dev-1/state")
        assert accepts(peer, "homeassistant/status") == (reader == "homeassistant")


@pytest.mark.parametrize(
    ("username", "password"), [(None, None), ("dev-1", "wrong"), ("dev-1", None), ("x", PASSWORD)]
)
def test_without_a_login_there_is_no_connection(
    broker: Broker, username: str | None, password: str | None
) -> None:
    with Peer(broker, None, username, password) as peer:
        assert peer.connected == REFUSED


def hello(broker: Broker, context: ssl.SSLContext) -> bytes:
    """What the listener for certificates answers to CONNECT."""
    with (
        socket.create_connection(("localhost", broker.cert_port), DEADLINE_S) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as wire,
    ):
        wire.sendall(CONNECT)
        return wire.recv(100)


def test_a_certificate_of_our_authority_is_needed(broker: Broker, tmp_path: Path) -> None:
    ours = broker.certs / "ca.crt"
    known = ssl.create_default_context(cafile=ours)
    known.load_cert_chain(broker.certs / "dev-2.crt", broker.certs / "dev-2.key")
    assert hello(broker, known).startswith(b"\x20")  # CONNACK
    with pytest.raises((ssl.SSLError, ConnectionError)):
        hello(broker, ssl.create_default_context(cafile=ours))
    subprocess.run(
        [FLEET / "make-certs", tmp_path, "localhost", "dev-1"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    foreign = ssl.create_default_context(cafile=ours)
    foreign.load_cert_chain(tmp_path / "dev-1.crt", tmp_path / "dev-1.key")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        hello(broker, foreign)


def test_nobody_speaks_without_tls(broker: Broker) -> None:
    for port in (broker.cert_port, broker.password_port):
        with socket.create_connection(("localhost", port), DEADLINE_S) as wire:
            wire.sendall(CONNECT)
            with contextlib.suppress(ConnectionError):
                assert not wire.recv(100).startswith(b"\x20")


def test_the_certificate_is_the_name_whatever_the_client_says(broker: Broker) -> None:
    """Neither a user name nor a client id makes dev-1 another."""
    with Peer(broker, "dev-2", client_id="edge_rt-dev-2") as victim:
        with Peer(broker, "dev-1", "dev-2", PASSWORD, "edge_rt-dev-2") as other:
            assert other.connected == 0
            assert accepts(other, "edge_rt/dev-1/state")
            assert not accepts(other, "edge_rt/dev-2/state")
            assert accepts(victim, "edge_rt/dev-2/state")
        with Peer(broker, "dev-2", client_id="another") as twin:
            assert twin.connected == 0
            # Taken over, which mosquitto 2.0.11 shows by closing the connection without a word.
            assert victim.ended.get(timeout=DEADLINE_S) in {0x8E, 0x80}


@pytest.mark.parametrize("name", ["a/b", "a+", "#", "ca", "broker", "..", "", "x" * 65])
def test_no_certificate_for_a_name_that_is_no_part_of_a_topic(name: str, tmp_path: Path) -> None:
    command = [FLEET / "make-certs", tmp_path / "certs", "localhost", name]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "must be 1 to 64 letters" in run.stderr
    assert not (tmp_path / "certs").exists()


def test_made_again_the_authority_stays(tmp_path: Path) -> None:
    command = [FLEET / "make-certs", tmp_path, "192.0.2.7"]
    subprocess.run([*command, "a"], check=True, capture_output=True, timeout=60)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.name != "ca.srl"}
    subprocess.run([*command, "a", "b"], check=True, capture_output=True, timeout=60)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.name != "ca.srl"}
    assert {name: after.pop(name) for name in before} == before
    assert set(after) == {"b.crt", "b.key"}
    assert {file.name for file in tmp_path.iterdir() if file.stat().st_mode & 0o077} == {
        "a.crt",
        "b.crt",
        "broker.crt",
        "ca.crt",
    }
    for name in ("broker", "a"):
        check = ["openssl", "verify", "-x509_strict", "-CAfile", "ca.crt", f"{name}.crt"]
        subprocess.run(check, check=True, cwd=tmp_path, capture_output=True, timeout=60)
    host = ["openssl", "x509", "-in", "broker.crt", "-noout", "-checkip", "192.0.2.7"]
    shown = subprocess.run(
        host, check=True, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "does match" in shown.stdout
