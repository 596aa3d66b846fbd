"""What Home Assistant is told; its templates are rendered by jinja2, which is what it uses."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from fakes.board_tools import nvml_gpu, nvml_module
from fakes.board_trees import jetpack6
from fakes.pages import full
from fakes.payloads import telemetry

from edge_rt.power.board import open_board
from edge_rt.power.settings import BoardSettings
from edge_rt.telemetry.homeassistant import discovery
from edge_rt.telemetry.snapshot import Snapshots

LEAST = {"interval_s": 10.0}
JETSON = LEAST | {
    "board_kind": "jetson",
    "board_model": "Jetson AGX Orin",
    "board_serial": "1423",
    "power_scope": "module rails",
}
SHOWN = {
    "requests_running": "8",
    "requests_waiting": "3",
    "requests_finished_total": "2",
    "generation_tok_s": "0.3",
    "ttft_ms_p50": "1000.0",
    "latency_ms_p50": "2001.0",
    "kv_cache_usage": "75.0",
    "spool_records": "7",
    "dropped_records_total": "3",
    "power_mw": "12.5",
    "energy_j_total": "1.035",
    "temperature_tj_c": "52.5",
    "load_gpu": "75.0",
    "power_mode": "MAXN",
    "lost": "temperature_cv0",
}


def announced(device: str = "jetson-1", **info: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(discovery("edge_rt", device, LEAST | info)[1])
    return found


def render(template: str, payload: dict[str, Any], state: str = "unknown") -> str:
    """As Home Assistant does; a name that is not there is an error, where it would only warn."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)  # noqa: S701 - no HTML
    shown = environment.from_string(template).render(
        value=json.dumps(payload), value_json=payload, this=SimpleNamespace(state=state)
    )
    return shown.strip()


def figures(payload: dict[str, Any], state: str = "unknown") -> dict[str, str]:
    """What each sensor of /telemetry makes of a record."""
    components = announced(**JETSON)["components"]
    return {
        key: render(component["value_template"], payload, state)
        for key, component in components.items()
        if "state_topic" not in component
    }


def test_a_live_record_is_shown() -> None:
    payload = telemetry()
    found = figures(payload)
    assert float(found.pop("memory_process_bytes")) == payload["memory_process_bytes"] > 2**20
    assert found == SHOWN


def test_a_record_of_the_past_changes_nothing() -> None:
    """Nothing, where Home Assistant ignores that; text as it was, where it would take it."""
    found = figures(telemetry(is_historical=True), state="before")
    texts = {key: found.pop(key) for key in ("power_mode", "lost")}
    assert texts == {"power_mode": "before", "lost": "before"}
    assert set(found.values()) == {""}


@pytest.mark.parametrize("state", ["unknown", "unavailable"])
def test_a_record_of_the_past_makes_no_state_of_none(state: str) -> None:
    found = figures(telemetry(is_historical=True), state)
    assert found["power_mode"] == found["lost"] == "None"


@pytest.mark.parametrize("missing", [*SHOWN, "memory_process_bytes"])
def test_what_a_live_record_lacks_is_unknown_and_costs_nothing_else(missing: str) -> None:
    payload = telemetry()
    expected = figures(payload) | {missing: "none" if missing == "lost" else "None"}
    del payload[missing]
    assert figures(payload, state="17") == expected


def test_a_record_that_says_nothing_is_survived() -> None:
    found = figures({})
    assert found.pop("lost") == "none"
    assert set(found.values()) == {"None"}


def test_a_long_list_fits_into_a_state() -> None:
    assert len(figures(telemetry() | {"lost": "x," * 400})["lost"]) == 255


def test_only_numbers_are_ignored_when_empty() -> None:
    """Home Assistant expects a number where there is a unit or a state class, and only there."""
    for key, component in announced(**JETSON)["components"].items():
        is_number = "state_class" in component or "unit_of_measurement" in component
        assert is_number == (key not in {"status", "lost", "power_mode"})


@pytest.mark.parametrize(
    ("state", "online"), [("ready", "online"), ("loading", "online"), ("offline", "offline")]
)
def test_availability_is_that_of_the_state(state: str, online: str) -> None:
    found = announced(**JETSON)
    (availability,) = found["availability"]
    assert availability["topic"] == "edge_rt/jetson-1/state"
    assert render(availability["value_template"], {"state": state}) == online
    status = found["components"]["status"]
    assert status["state_topic"] == availability["topic"]
    assert "expire_after" not in status
    assert render(status["value_template"], {"state": state}) == state


def test_figures_expire() -> None:
    for interval_s, expires_s in ((10.0, 30), (0.1, 1), (2.5, 8)):
        components = announced(**JETSON | {"interval_s": interval_s})["components"]
        expiries = {one["expire_after"] for key, one in components.items() if key != "status"}
        assert expiries == {expires_s}


def test_the_device() -> None:
    topic, payload = discovery("a/b", "jetson-1", JETSON)
    found = json.loads(payload)
    assert topic == "homeassistant/device/edge_rt-jetson-1/config"
    assert found["state_topic"] == "a/b/jetson-1/telemetry"
    assert found["device"]["identifiers"] == ["edge_rt-jetson-1"]
    assert found["device"]["name"] == "jetson-1"
    assert found["device"]["model"] == "Jetson AGX Orin"
    assert found["device"]["serial_number"] == "1423"
    assert found["origin"]["name"] == "edge_rt"
    ids = [component["unique_id"] for component in found["components"].values()]
    assert len(set(ids)) == len(ids)
    assert all(one.startswith("edge_rt-jetson-1_") for one in ids)


def test_a_machine_announces_what_it_has() -> None:
    board = {"power_mw", "energy_j_total", "load_gpu", "power_mode", "lost"}
    jetson = set(announced(**JETSON)["components"])
    assert jetson >= board | {"temperature_tj_c"}
    nvml = set(announced(board_kind="nvml", power_scope="GPUs")["components"])
    assert nvml - jetson == {"temperature_gpu0_c", "load_gpu0"}
    assert jetson - nvml == {"temperature_tj_c", "load_gpu", "power_mode"}
    linux = set(announced(board_kind="linux")["components"])
    assert jetson - linux == board - {"lost"} | {"temperature_tj_c"}
    assert jetson - set(announced()["components"]) == board | {"temperature_tj_c"}


@pytest.mark.parametrize("kind", ["jetson", "nvml"])
def test_what_is_announced_of_a_board_is_what_its_reading_has(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "pynvml", nvml_module(nvml_gpu()))
    root = jetpack6().write(tmp_path) if kind == "jetson" else tmp_path
    board = open_board(BoardSettings(root=str(root)))
    info, reading = board.info, replace(board.read(), energy_j=1.0, metered_s=1.0)
    board.close()
    assert info.kind == kind
    figures = Snapshots(replace(full(), board=lambda: (info, reading))).take()
    announced_of_it = set(announced(board_kind=kind, power_scope="x")["components"])
    assert announced_of_it - set(announced()["components"]) - {"lost"} <= figures.keys()


def test_devices_stay_apart_in_what_home_assistant_allows() -> None:
    names = ["a", "a_b", "a.b", "a:b", "a-b", "x" * 64]
    topics = [discovery("edge_rt", name, LEAST)[0] for name in names]
    assert len(set(topics)) == len(names)
    assert all(re.fullmatch(r"homeassistant/device/[A-Za-z0-9_-]+/config", one) for one in topics)
