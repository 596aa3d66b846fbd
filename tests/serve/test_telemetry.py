"""The daemon, its machine's sensors and a real broker."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import schema
from fakes.board_trees import jetpack6
from fakes.broker import Broker, Heard, Listener, broker, listener
from fakes.waiting import eventually, free_port
from paho.mqtt.client import topic_matches_sub

from .conftest import Daemon, started

Bundles = Callable[[str], Path]

SETTINGS = """\
[telemetry]
interval_s = {interval_s}

[board]
root = "{directory}/root"
interval_s = 0.1

[mqtt]
host = "127.0.0.1"
port = {port}
spool_file = "{directory}/spool.sqlite"
spool_commit_s = {commit_s}
commands = ["bench", "drain"]
home_assistant = true
"""


class Device:
    """A daemon's machine and settings."""

    def __init__(
        self, directory: Path, port: int, interval_s: float = 0.2, commit_s: float = 1.0
    ) -> None:
        self.root = jetpack6().write(directory / "root")
        self.file = directory / "settings.toml"
        self.file.write_text(
            SETTINGS.format(
                directory=directory, port=port, interval_s=interval_s, commit_s=commit_s
            )
        )

    @contextlib.contextmanager
    def serving(self, bundle: Path) -> Iterator[Daemon]:
        with started(bundle, "--config", str(self.file)) as daemon:
            yield daemon


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Broker]:
    with broker(tmp_path) as one:
        yield one


def ours(heard: list[Heard], kind: str) -> list[dict[str, Any]]:
    return [
        one.fields for one in heard if re.fullmatch(rf"edge_rt/jetson-[0-9]+/{kind}", one.topic)
    ]


def metric(daemon: Daemon, sample: str) -> float | None:
    page = httpx.get(f"{daemon.url}/metrics").text
    found = re.search(rf"^{re.escape(sample)} (\S+)$", page, re.MULTILINE)
    return None if found is None else float(found[1])


def complete(daemon: Daemon) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
    assert httpx.post(f"{daemon.url}/v1/completions", json=body).status_code == 200


def is_complete(records: list[dict[str, Any]]) -> dict[str, list[int]]:
    """By boot: sequence numbers after de-duplication, which begin with 1 and have no gap."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for record in records:
        numbers[record["boot_id"]].add(record["seq"])
    found = {boot: sorted(one) for boot, one in numbers.items()}
    for boot, one in found.items():
        assert one == list(range(1, len(one) + 1)), (boot, one)
    return found


def give_commands(ears: Listener) -> None:
    """One that is answered with a measurement, and one that is refused."""
    topic = next(one.topic for one in ears.heard if one.topic.endswith("/state"))
    prefix = topic.removesuffix("/state")
    ears.send(f"{prefix}/cmd/bench", '{"samples": 2}', response="re", correlation=b"7")
    answer = eventually(lambda: ears.on("re"))[0]
    assert answer.correlation == b"7"
    assert answer.fields["ok"] is True
    assert answer.fields["tokens"] == 64
    ears.send(f"{prefix}/cmd/bench", '{"sample": 2}', response="re2")
    refused = eventually(lambda: ears.on("re2"))[0].fields
    assert refused["ok"] is False
    assert "did you mean 'samples'" in refused["error"]


def test_a_life(demo_bundle: Bundles, tmp_path: Path, bus: Broker) -> None:
    device = Device(tmp_path, bus.port)
    with listener(bus.port) as ears:
        with device.serving(demo_bundle("demo.null")) as daemon:
            complete(daemon)
            eventually(lambda: [r for r in ours(ears.heard, "telemetry") if "ttft_ms_p50" in r])
            daemon.process.send_signal(signal.SIGHUP)
            eventually(
                lambda: "settings-reloaded" in [e["event"] for e in ours(ears.heard, "event")]
            )
            give_commands(ears)
            assert metric(daemon, 'edge_rt_mqtt_state{state="connected"}') == 1
            assert metric(daemon, "edge_rt_board_power_watts") is not None
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(20) == 0
        eventually(lambda: "offline" in ears.states())
        heard = list(ears.heard)
    for one in heard:
        if one.topic.startswith("edge_rt/") and "/cmd/" not in one.topic:
            schema.check(one.topic, one.fields)
    states = [fields["state"] for fields in ours(heard, "state")]
    *first, ready, draining, offline = (state for state, _ in itertools.groupby(states))
    assert (ready, draining, offline) == ("ready", "draining", "offline")
    assert first in ([], ["loading"])  # the null engine may be ready before the connection is
    assert ours(heard, "state")[-1]["reason"] == "stopped"
    for kind in ("telemetry", "event", "bench"):
        assert len(is_complete(ours(heard, kind))) == 1
    in_order = sorted(ours(heard, "event"), key=lambda fields: fields["seq"])
    events = [fields["event"] for fields in in_order]
    assert events == ["started", "ready", "settings-reloaded", "draining", "stopped"]
    figures = ours(heard, "telemetry")
    live = [figure["seq"] for figure in figures if not figure["historical"]]
    assert live == sorted(live)
    last = figures[-1]
    assert last["generation_tokens_total"] == 8 + 64 + 32  # one of the benchmark's is not measured
    assert last["requests_finished_total"] == 1
    assert last["power_mw"] == pytest.approx(
        sum(last[f"rail_{rail}_mw"] for rail in RAILS), abs=0.1
    )
    assert last["energy_j_total"] > 0
    info = ours(heard, "info")[-1]
    assert info["engine"] == "null"
    assert info["board_kind"] == "jetson"
    assert info["l4t"].startswith("36.")
    assert info["commands"] == "bench,drain"
    announced = [
        one for one in heard if topic_matches_sub("homeassistant/device/+/config", one.topic)
    ]
    assert json.loads(announced[0].payload)["origin"]["name"] == "edge_rt"
    (bench,) = ours(heard, "bench")
    assert (bench["scenario"], bench["tokens"]) == ("single-stream", 64)


RAILS = ("vdd_gpu_soc", "vdd_cpu_cv", "vin_sys_5v0")


def test_a_drain_from_afar(demo_bundle: Bundles, tmp_path: Path, bus: Broker) -> None:
    device = Device(tmp_path, bus.port)
    with listener(bus.port) as ears, device.serving(demo_bundle("demo.null")) as daemon:
        topic = eventually(lambda: ears.on("/state"))[0].topic
        ears.send(topic.replace("/state", "/cmd/drain"), response="re")
        assert eventually(lambda: ears.on("re"))[0].fields["ok"] is True
        assert daemon.process.wait(20) == 0
        eventually(lambda: ears.states()[-1] == "offline")


def test_a_lost_sensor_costs_itself(demo_bundle: Bundles, tmp_path: Path, bus: Broker) -> None:
    device = Device(tmp_path, bus.port)
    with listener(bus.port) as ears, device.serving(demo_bundle("demo.null")) as daemon:
        eventually(lambda: [r for r in ours(ears.heard, "telemetry") if "power_mw" in r])
        label = next(
            one
            for one in device.root.glob("sys/devices/platform/*/*/*/hwmon/hwmon*/in1_label")
            if one.read_text().strip() == "VDD_GPU_SOC"
        )
        current = label.with_name("curr1_input")
        was = current.read_text()
        current.write_text("garbage\n")
        figure = eventually(lambda: [r for r in ours(ears.heard, "telemetry") if "lost" in r])[0]
        assert "power_mw" not in figure  # a sum without a part is no sum
        assert "rail_vdd_cpu_cv_mw" in figure
        complete(daemon)
        lost = eventually(lambda: [e for e in ours(ears.heard, "event") if "sensor" in e])[0]
        assert lost["event"] == "sensor-lost"
        assert "edge_rt_board_lost{" in httpx.get(f"{daemon.url}/metrics").text
        current.write_text(was)
        eventually(lambda: "sensor-back" in [event["event"] for event in ours(ears.heard, "event")])
        assert eventually(lambda: "power_mw" in ours(ears.heard, "telemetry")[-1])


def test_nothing_but_telemetry_minds_a_broker_that_is_not_there(
    demo_bundle: Bundles, tmp_path: Path
) -> None:
    device = Device(tmp_path, free_port())
    with device.serving(demo_bundle("demo.null")) as daemon:
        complete(daemon)
        eventually(lambda: metric(daemon, 'edge_rt_mqtt_state{state="down"}') == 1)
        eventually(lambda: (metric(daemon, "edge_rt_mqtt_spool_records") or 0) > 3)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(20) == 0


def test_settings_that_cannot_work_are_refused_at_the_start(
    demo_bundle: Bundles, tmp_path: Path
) -> None:
    device = Device(tmp_path, free_port())
    settings = device.file.read_text()
    for line, message in (
        ('username = "a"\npassword_file = "/nowhere"', "password_file /nowhere: No such file"),
        ('tls = true\nca_file = "/nowhere"', "ca_file /nowhere: No such file"),
        ('ca_file = "/nowhere"', "set tls = true"),
        ('device = "a/b"', "device must be"),
    ):
        device.file.write_text(f"{settings}{line}\n")
        bundle, file = str(demo_bundle("demo.null")), str(device.file)
        command = [sys.executable, "-m", "edge_rt", "serve", "--bundle", bundle, "--config", file]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr


def test_a_bundle_that_does_not_load_is_a_failure(
    demo_bundle: Bundles, tmp_path: Path, bus: Broker
) -> None:
    device = Device(tmp_path, bus.port)
    command = [sys.executable, "-m", "edge_rt", "serve", "--bundle", str(tmp_path / "nowhere")]
    with listener(bus.port) as ears:
        command += ["--port", "0", "--config", str(device.file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1, done.stderr
        with device.serving(demo_bundle("demo.null")):  # it sends what the first had no time for
            failed = eventually(
                lambda: [one for one in ours(ears.heard, "event") if one["event"] == "failed"]
            )[0]
    assert "nowhere" in failed["message"]


@pytest.mark.slow
def test_twenty_kills(demo_bundle: Bundles, tmp_path: Path, bus: Broker) -> None:
    """The spool opens each time; what is lost is of the last commit interval."""
    interval_s = commit_s = 0.1
    device, bundle = Device(tmp_path, bus.port, interval_s, commit_s), demo_bundle("demo.null")
    draw = random.Random(6)  # noqa: S311
    bus.kill()
    held: list[int] = []  # just before each kill
    for _ in range(20):
        with device.serving(bundle) as daemon:
            time.sleep(draw.uniform(1.0, 2.0))
            held.append(int(metric(daemon, "edge_rt_mqtt_spool_records") or 0))
            assert metric(daemon, "edge_rt_mqtt_spool_fault") == 0
            daemon.process.kill()
    bus.start()
    with listener(bus.port) as ears, device.serving(bundle) as daemon:
        eventually(lambda: metric(daemon, "edge_rt_mqtt_spool_records") == 0)
        assert metric(daemon, "edge_rt_mqtt_dropped_records_total") == 0
        heard = list(ears.heard)
    boots = is_complete(ours(heard, "telemetry"))
    assert is_complete(ours(heard, "event")).keys() == boots.keys()
    assert len(boots) == 21
    # Boots in their order, and how many records there were after each.
    there = list(
        itertools.accumulate(
            sum(record["boot_id"] == boot for kind in KINDS for record in unique(heard, kind))
            for boot in boots
        )
    )
    lost = [0, *(0 for _ in there)]
    for number, count in enumerate(held):
        lost[number + 1] = count - there[number]
    assert max(lost) <= 10 * commit_s / interval_s, lost


KINDS = ("telemetry", "event")


def unique(heard: list[Heard], kind: str) -> list[dict[str, Any]]:
    return list({(one["boot_id"], one["seq"]): one for one in ours(heard, kind)}.values())
