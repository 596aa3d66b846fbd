"""Connections that fail, end, or are taken: what the status says, and how often it is tried."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.broker import Broker, broker, eventually, listener, proxy
from fakes.broker_certificates import Authority
from fakes.broker_client import QUICK, Device, device

from edge_rt.errors import ConfigError
from edge_rt.telemetry import login
from edge_rt.telemetry.backoff import Backoff, Delays
from edge_rt.telemetry.device import default_device
from edge_rt.telemetry.publisher import Duties
from edge_rt.telemetry.settings import MqttSettings

# paho leaves a socket whose TLS handshake failed to the garbage collector.
UNCLOSED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
LEFT_S = 5.0  # what `stop` may take


def stop_in_time(box: Device) -> None:
    begun = time.monotonic()
    assert box.publisher.stop()
    assert time.monotonic() - begun < LEFT_S
    assert not box.publisher._thread.is_alive()
    assert box.status.state == "off"


def secret(path: Path, text: str) -> str:
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def mosquitto_password(path: Path, password: str) -> None:
    """PBKDF2 by mosquitto's own tool."""
    import subprocess

    path.touch(0o600)
    subprocess.run(
        ["mosquitto_passwd", "-b", "-c", str(path), "box", password],
        check=True,
        capture_output=True,
    )


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Broker]:
    users = tmp_path / "users"
    mosquitto_password(users, "right")
    with broker(tmp_path, "allow_anonymous false", f"password_file {users}") as found:
        yield found


def test_wrong_password_is_no_connection_and_a_corrected_one_is_read(
    guarded: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The frigate line: a refused CONNACK is auth-failed, backs off, and is not 'connected'."""
    caplog.set_level(logging.INFO)
    path = secret(tmp_path / "password", "wrong\n")
    with device(guarded.port, username="box", password_file=path) as box:
        eventually(lambda: box.status.state == "auth-failed")
        assert "Not authorized" in box.status.why
        box.make(3)
        time.sleep(1.0)
        assert box.status.published_records == 0
        assert box.status.state == "auth-failed"
        tries = guarded.log().count("Sending CONNACK to")
        assert 1 <= tries <= 4, "0.3 s and more between them"
        secret(tmp_path / "password", "right\n")
        eventually(lambda: box.status.state == "connected")
        eventually(lambda: box.status.published_records == 3)
    said = [record for record in caplog.records if "auth-failed" in record.getMessage()]
    assert len(said) == 1, "one line per change, not per try"
    assert "password_file" in said[0].getMessage()
    assert "wrong" not in caplog.text
    assert "right" not in caplog.text


def test_password_comes_from_the_credential(
    guarded: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret(tmp_path / login.CREDENTIAL, "right")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    with device(guarded.port, username="box") as box:
        eventually(lambda: box.status.state == "connected")


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


def fake_broker(answers: list[bytes]) -> tuple[socket.socket, list[float]]:
    """Sends these to each client, one by one; when each one came."""
    server, came = socket.create_server(("127.0.0.1", 0)), []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = server.accept()
                came.append(time.monotonic())
                with end:
                    end.recv(1000)
                    for answer in answers:
                        end.sendall(answer)
                        time.sleep(0.05)

    threading.Thread(target=serve, daemon=True).start()
    return server, came


CONNACK = b"\x20\x03\x00\x00\x00"


def test_takeover_that_the_broker_tells_is_seen_at_once_and_waits() -> None:
    """frigate#3280: DISCONNECT with reason 142, as the standard has it."""
    events: list[float] = []
    duties = Duties(on_event=lambda _name, fields: events.append(fields["retry_s"]))
    server, came = fake_broker([CONNACK, b"\xe0\x02\x8e\x00"])
    with server:
        with device(server.getsockname()[1], duties=duties) as box:
            eventually(lambda: box.status.state == "taken-over")
            assert "Session taken over" in box.status.why
            eventually(lambda: len(came) == 2)
            assert came[1] - came[0] >= 2.0
            eventually(lambda: len(events) == 2)
            assert 2 <= events[0] <= 3
            assert 4 <= events[1] <= 6, "a short success is none"
        server.shutdown(socket.SHUT_RDWR)


def test_broker_without_qos_1_is_named() -> None:
    server, _ = fake_broker([b"\x20\x05\x00\x00\x02\x24\x00"])
    with server:
        with device(server.getsockname()[1]) as box:
            eventually(lambda: box.status.state == "down")
            assert "QoS 1" in box.status.why
        server.shutdown(socket.SHUT_RDWR)


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
        device(network.port, keepalive_s=5) as box,
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


@UNCLOSED
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


def test_stop_before_a_login_is_accepted(guarded: Broker, tmp_path: Path) -> None:
    box = Device(guarded.port, username="box", password_file=secret(tmp_path / "p", "wrong"))
    box.publisher.start()
    eventually(lambda: box.status.state == "auth-failed")
    stop_in_time(box)


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


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("pki")
    good, other = Authority(directory, "ca"), Authority(directory, "other")
    local = "DNS:localhost,IP:127.0.0.1"
    return {
        "ca": good.certificate,
        "other": other.certificate,
        "good": good.sign("good", local),
        "expired": good.sign("expired", local, days=-1),
        "elsewhere": good.sign("elsewhere", "DNS:elsewhere.example"),
        "client": good.sign("client"),
        "stranger": other.sign("stranger"),
    }


def tls_options(pki: dict[str, Any], server: str) -> list[str]:
    certificate, key = pki[server]
    return [
        f"cafile {pki['ca']}", f"certfile {certificate}", f"keyfile {key}",
        "require_certificate true", "use_identity_as_username true",
    ]  # fmt: skip


def test_tls_with_client_certificates(tmp_path: Path, pki: dict[str, Any]) -> None:
    with broker(tmp_path, *tls_options(pki, "good")) as made:
        certificate, key = map(str, pki["client"])
        more = {"tls": True, "ca_file": str(pki["ca"]), "cert_file": certificate, "key_file": key}
        login.check(MqttSettings(host="localhost", **more))
        with device(made.port, tmp_path / "spool", host="localhost", **more) as box:
            eventually(lambda: box.status.state == "connected")
            box.make(200)
            eventually(lambda: box.status.published_records == 200)
        assert "u'client'" in made.log()


@UNCLOSED
@pytest.mark.parametrize(
    ("server", "ca", "client", "why"),
    [
        ("expired", "ca", "client", "expired"),
        ("elsewhere", "ca", "client", "mismatch"),
        ("good", "other", "client", "not trusted: self-signed certificate in certificate chain"),
        ("good", None, "client", "not trusted: self-signed certificate in certificate chain"),
        ("good", "ca", None, "it may want a client certificate"),
        ("good", "ca", "stranger", "or not accept this one"),
    ],
)
def test_tls_refusals_name_the_fault(
    tmp_path: Path, pki: dict[str, Any], server: str, ca: str | None, client: str | None, why: str
) -> None:
    """PAHO#891: a TLS fault ends no thread, and nothing says that it is connected."""
    more: dict[str, Any] = {"tls": True}
    if ca is not None:
        more["ca_file"] = str(pki[ca])
    if client is not None:
        more["cert_file"], more["key_file"] = map(str, pki[client])
    with (
        broker(tmp_path, *tls_options(pki, server)) as made,
        device(made.port, host="localhost", **more) as box,
    ):
        eventually(lambda: box.status.state == "down")
        assert why in box.status.why
        tried = made.log().count("New connection from")
        eventually(lambda: made.log().count("New connection from") > tried + 1, "another try")
        assert box.publisher._thread.is_alive()


FAULTS: dict[str, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {
    "ca_file .*: No such file": lambda at, pki: {"ca_file": str(at / "none")},
    "holds no certificate": lambda at, pki: {"ca_file": secret(at / "x", "hello")},
    "cert_file .*: No such file": lambda at, pki: {
        "cert_file": str(at / "none"),
        "key_file": str(pki["client"][1]),
    },
    "belong together": lambda at, pki: {
        "cert_file": str(pki["client"][0]),
        "key_file": str(pki["stranger"][1]),
    },
    "not encrypted": lambda at, pki: {
        "cert_file": str(pki["client"][0]),
        "key_file": encrypted(pki["client"][1], at / "encrypted"),
    },
    "can be read by everybody": lambda at, pki: {
        "username": "u",
        "password_file": readable(secret(at / "p", "x")),
    },
    "password_file .*: No such file": lambda at, pki: {
        "username": "u",
        "password_file": str(at / "none"),
    },
    "found 0": lambda at, pki: {"username": "u", "password_file": secret(at / "p", "\n")},
    "not UTF-8": lambda at, pki: {"username": "u", "password_file": binary(at / "p")},
}


def encrypted(key: Path, path: Path) -> str:
    import subprocess

    subprocess.run(
        ["openssl", "ec", "-in", str(key), "-aes128", "-passout", "pass:x", "-out", str(path)],
        check=True,
        capture_output=True,
    )
    return str(path)


def readable(path: str) -> str:
    Path(path).chmod(0o644)
    return path


def binary(path: Path) -> str:
    path.touch(0o600)
    path.write_bytes(b"\xff\xfe")
    return str(path)


@pytest.mark.parametrize("fault", FAULTS)
def test_check_names_the_file_and_its_fault(
    fault: str, tmp_path: Path, pki: dict[str, Any]
) -> None:
    settings = MqttSettings(host="h", tls=True, **FAULTS[fault](tmp_path, pki))
    with pytest.raises(ConfigError, match=fault):
        login.check(settings)


def test_only_one_line_end_is_no_part_of_the_password(tmp_path: Path) -> None:
    path = secret(tmp_path / "p", "two words\n\n")
    settings = MqttSettings(host="localhost", username="u", password_file=path)
    assert login.read_login(settings).password == "two words\n"  # noqa: S105
    assert "two words" not in repr(login.read_login(settings))


@pytest.mark.parametrize(
    ("host", "tls", "warns"),
    [("127.0.0.1", False, False), ("::1", False, False), ("localhost", False, False),
     ("10.0.0.1", False, True), ("broker", False, True), ("broker", True, False)],
)  # fmt: skip
def test_password_that_crosses_the_network_in_the_clear_is_warned_of(
    host: str, tls: bool, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = secret(tmp_path / "p", "x")
    login.check(MqttSettings(host=host, tls=tls, username="u", password_file=path))
    assert ("unencrypted" in caplog.text) == warns


def test_files_that_are_gone_later_are_a_reason_to_be_down(tmp_path: Path) -> None:
    with (
        broker(tmp_path) as made,
        device(made.port, username="u", password_file=str(tmp_path / "gone")) as box,
    ):
        eventually(lambda: box.status.state == "down")
        assert "gone: No such file" in box.status.why
        secret(tmp_path / "gone", "x")
        eventually(lambda: box.status.state == "connected")


def test_broker_of_another_protocol_is_named() -> None:
    server, _ = fake_broker([b"\x20\x02\x00\x01"])  # MQTT 3.1.1: unacceptable version
    with server:
        with device(server.getsockname()[1]) as box:
            eventually(lambda: box.status.state == "down")
            assert "MQTT 5" in box.status.why
        server.shutdown(socket.SHUT_RDWR)


def test_session_is_not_the_brokers(tmp_path: Path) -> None:
    """PAHO#877, PAHO#542: clean start and no expiry; the spool alone remembers."""
    with broker(tmp_path) as made, proxy(made.port) as network, device(network.port) as box:
        eventually(lambda: box.status.state == "connected")
        network.cut()
        eventually(lambda: box.status.state == "down")
        network.is_open = True
        eventually(lambda: box.status.state == "connected")
        logins = [line for line in made.log().splitlines() if "as edge_rt-box" in line]
        assert len(logins) == 2
        assert all("c1" in line for line in logins)


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


def test_quick_connections_do_not_reset_the_wait(tmp_path: Path) -> None:
    """A broker that accepts and then ends the connection is not tried at full speed."""
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


def tree(root: Path, serial: str = "", compatible: str = "", machine: str = "") -> Path:
    for name, content in (
        ("proc/device-tree/serial-number", serial),
        ("proc/device-tree/compatible", compatible),
        ("etc/machine-id", machine),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if content:
            (root / name).write_bytes(content.encode())
    return root


def test_device_is_named_by_its_serial_number(tmp_path: Path) -> None:
    jetson = tree(tmp_path, "1423822006532\0", "nvidia,p3737-0000+p3701-0000\0nvidia,tegra234\0")
    assert default_device(jetson) == "jetson-1423822006532"
    assert default_device(tree(tmp_path, "14/2 #+\0")) == "jetson-14-2-"


def test_device_elsewhere_is_named_by_host_and_machine(tmp_path: Path) -> None:
    machine = "0123456789abcdef0123456789abcdef"
    other = tree(tmp_path, "10000000abcd", "raspberrypi,4-model-b\0brcm,bcm2711\0", f"{machine}\n")
    name = default_device(other, "my host/1")
    assert name.startswith("my-host-1-")
    assert len(name) == len("my-host-1-") + 6
    assert name == default_device(other, "my host/1"), "it stays"
    assert name[-6:] not in machine
    assert len(default_device(other, "h" * 200)) == 64
    (other / "etc/machine-id").write_text("f" * 32)
    assert default_device(other, "my host/1") != name


def test_device_without_an_identity_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bare = tree(tmp_path, machine="uninitialized\n")
    assert default_device(bare, "host") != default_device(bare, "host")
    assert "set device in [mqtt]" in caplog.text
