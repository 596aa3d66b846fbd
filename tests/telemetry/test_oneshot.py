"""A benchmark's result at a real broker."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from fakes.broker import broker, listener
from fakes.broker_certificates import Authority
from fakes.waiting import eventually, free_port

from edge_rt.errors import PublishError
from edge_rt.telemetry import oneshot
from edge_rt.telemetry.settings import MqttSettings

FIELDS = {"scenario": "offline", "throughput_tok_s": 64.5}


def test_a_record(tmp_path: Path) -> None:
    with broker(tmp_path) as bus, listener(bus.port) as ears:
        settings = MqttSettings(host="127.0.0.1", port=bus.port, base="fleet/a")
        for _ in range(2):
            assert oneshot.publish(settings, "box", "bench", FIELDS) == "fleet/a/box/bench"
        heard = eventually(lambda: len(ears.heard) == 2 and ears.heard)
        first, second = (one.fields for one in heard)
        assert first.items() >= (FIELDS | {"seq": 1, "historical": False}).items()
        assert first["boot_id"] != second["boot_id"]
        assert not heard[0].retain


def test_over_tls_with_a_client_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, key = authority.sign("server", "IP:127.0.0.1")
    mine, my_key = authority.sign("box")
    options = [
        f"cafile {authority.certificate}",
        f"certfile {server}",
        f"keyfile {key}",
        "require_certificate true",
    ]
    with broker(tmp_path, *options) as bus:
        settings = MqttSettings(
            host="127.0.0.1",
            port=bus.port,
            tls=True,
            ca_file=str(authority.certificate),
            cert_file=str(mine),
            key_file=str(my_key),
        )
        oneshot.publish(settings, "box", "bench", FIELDS)
        stranger = Authority(tmp_path, "stranger")
        wrong = MqttSettings(
            host="127.0.0.1", port=bus.port, tls=True, ca_file=str(stranger.certificate)
        )
        with pytest.raises(PublishError, match="is not trusted"):
            oneshot.publish(wrong, "box", "bench", FIELDS)


def test_a_refused_login(tmp_path: Path) -> None:
    with broker(tmp_path, "allow_anonymous false") as bus:
        settings = MqttSettings(host="127.0.0.1", port=bus.port)
        with pytest.raises(
            PublishError, match=r"box/bench could not .* refused the login: Not authorized"
        ):
            oneshot.publish(settings, "box", "bench", FIELDS)


def test_a_topic_that_is_not_allowed(tmp_path: Path) -> None:
    rights = tmp_path / "acl"
    rights.write_text("topic readwrite elsewhere/#\n")
    with broker(tmp_path, f"acl_file {rights}") as bus:
        settings = MqttSettings(host="127.0.0.1", port=bus.port)
        with pytest.raises(
            PublishError, match=r"box/bench could not .* refused it: Not authorized"
        ):
            oneshot.publish(settings, "box", "bench", FIELDS)


def test_nobody_there_and_one_who_says_nothing() -> None:
    settings = MqttSettings(host="127.0.0.1", port=free_port())
    with pytest.raises(PublishError, match="refused"):
        oneshot.publish(settings, "box", "bench", FIELDS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = MqttSettings(host="127.0.0.1", port=silent.getsockname()[1])
        with pytest.raises(PublishError, match="did not answer in time"):
            oneshot.publish(settings, "box", "bench", FIELDS, timeout_s=0.3)
