"""Passwords and certificates, right and wrong."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.broker import Broker, broker
from fakes.broker_certificates import Authority
from fakes.broker_client import Device, device
from fakes.waiting import eventually

from edge_rt.errors import ConfigError
from edge_rt.telemetry import login
from edge_rt.telemetry.settings import MqttSettings


def secret(path: Path, text: str) -> str:
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def mosquitto_password(path: Path, password: str) -> None:
    """PBKDF2 by mosquitto's own tool."""
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


def test_stop_before_a_login_is_accepted(guarded: Broker, tmp_path: Path) -> None:
    box = Device(guarded.port, username="box", password_file=secret(tmp_path / "p", "wrong"))
    box.publisher.start()
    eventually(lambda: box.status.state == "auth-failed")
    begun = time.monotonic()
    assert box.publisher.stop()
    assert time.monotonic() - begun < 5.0


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
        "stale": good.sign("stale", days=-1),
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


@pytest.mark.parametrize(
    ("server", "ca", "client", "why"),
    [
        ("expired", "ca", "client", "expired"),
        ("elsewhere", "ca", "client", "mismatch"),
        ("good", "other", "client", "not trusted: self-signed certificate in certificate chain"),
        ("good", None, "client", "not trusted: self-signed certificate in certificate chain"),
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


@pytest.mark.parametrize(
    ("client", "why"),
    [
        (None, "certificate required"),
        ("stranger", "unknown ca"),
        ("stale", "certificate expired"),
    ],
)
@pytest.mark.parametrize("version", ["tlsv1.3", "tlsv1.2"])
def test_refused_certificate_is_a_refused_login(
    tmp_path: Path, pki: dict[str, Any], client: str | None, why: str, version: str
) -> None:
    """The alert is found also if CONNECT was in its way: each try gives the same reason."""
    more: dict[str, Any] = {"tls": True, "ca_file": str(pki["ca"])}
    if client is not None:
        more["cert_file"], more["key_file"] = map(str, pki[client])
    options = [*tls_options(pki, "good"), f"tls_version {version}"]
    with broker(tmp_path, *options) as made, device(made.port, host="localhost", **more) as box:
        seen = set()
        for _ in range(4):
            before = made.log().count("New connection from")
            eventually(lambda before=before: made.log().count("New connection from") > before)
            eventually(lambda: box.status.state == "auth-failed")
            seen.add(box.status.why)
        if client is not None or version == "tlsv1.3":
            assert seen == {f"the broker refused the client certificate: {why}"}


def test_tls_on_one_side_alone_is_named(tmp_path: Path, pki: dict[str, Any]) -> None:
    with (
        broker(tmp_path, *tls_options(pki, "good")) as made,
        device(made.port) as box,
    ):
        eventually(lambda: box.status.state == "down")
        assert "set tls = true" in box.status.why
    with broker(tmp_path) as made, device(made.port, tls=True, ca_file=str(pki["ca"])) as box:
        eventually(lambda: box.status.state == "down")
        assert "its port may be one without TLS" in box.status.why


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
