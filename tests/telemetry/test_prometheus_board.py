"""The families of board and link, read by prometheus_client's own parser."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import get_args

import pytest
from fakes.pages import ORIN, full, link, reading, series
from prometheus_client import parser

from edge_rt.core import BoardInfo, BoardReading
from edge_rt.telemetry.prometheus import Exposition
from edge_rt.telemetry.sources import Sources
from edge_rt.telemetry.status import LinkState, LinkStatus

Labels = frozenset[tuple[str, str]]


def samples(sources: Sources, start: str) -> dict[tuple[str, Labels], float]:
    """Of the families whose names start so."""
    page = Exposition(sources).page("")[0].decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith(start)
    }


def on(info: BoardInfo, found: BoardReading) -> Sources:
    return dataclasses.replace(full(), board=lambda: (info, found))


def one(name: str, **labels: str) -> tuple[str, Labels]:
    return name, frozenset(labels.items())


def test_a_board_that_says_all() -> None:
    board = dataclasses.replace(reading(), taken_ns=time.monotonic_ns() - 7_000_000_000)
    found = samples(on(ORIN, board), "edge_rt_board_")
    age_s = found.pop(one("edge_rt_board_reading_age_seconds"))
    assert 7 <= age_s < 70
    info = {
        "kind": "jetson",
        "model": "Jetson AGX Orin",
        "l4t": "36.4.7",
        "jetpack": "6.2.1",
        "power_scope": "module rails",
    }
    assert found == {
        one("edge_rt_board_info", **info): 1,
        one("edge_rt_board_power_watts"): 12.5,
        one("edge_rt_board_rail_power_watts", rail="VDD_GPU_SOC"): 7,
        one("edge_rt_board_rail_power_watts", rail="VDD_CPU_CV"): 1.5,
        one("edge_rt_board_rail_power_watts", rail="VIN_SYS_5V0"): 4,
        one("edge_rt_board_energy_joules_total"): 3600.5,
        one("edge_rt_board_metered_seconds_total"): 300.25,
        one("edge_rt_board_power_mode_info", power_mode="MAXN"): 1,
        one("edge_rt_board_temperature_celsius", zone="tj"): 52.5,
        one("edge_rt_board_temperature_celsius", zone="cpu"): 50.25,
        one("edge_rt_board_clock_hertz", clock="gpu"): 1.3005e9,
        one("edge_rt_board_load_ratio", unit="gpu"): 0.75,
        one("edge_rt_board_load_ratio", unit="emc"): 0.5,
        one("edge_rt_board_fan_rpm", fan="fan"): 1800,
        one("edge_rt_board_throttle_events_total", reason="under-voltage"): 0,
        one("edge_rt_board_throttle_events_total", reason="over-current"): 2,
        one("edge_rt_board_memory_bytes"): 64 << 30,
        one("edge_rt_board_memory_available_bytes"): 40 << 30,
        one("edge_rt_board_lost", metric="temperature_cv0"): 1,
    }


@pytest.mark.parametrize(
    ("field", "gone"),
    [
        ("power_mw", "edge_rt_board_power_watts"),
        ("energy_j", "edge_rt_board_energy_joules_total"),
        ("metered_s", "edge_rt_board_metered_seconds_total"),
        ("memory_total_bytes", "edge_rt_board_memory_bytes"),
        ("memory_available_bytes", "edge_rt_board_memory_available_bytes"),
        ("power_mode", "edge_rt_board_power_mode_info"),
        ("rails_mw", "edge_rt_board_rail_power_watts"),
        ("temperatures_c", "edge_rt_board_temperature_celsius"),
        ("clocks_hz", "edge_rt_board_clock_hertz"),
        ("loads", "edge_rt_board_load_ratio"),
        ("fans_rpm", "edge_rt_board_fan_rpm"),
        ("throttles", "edge_rt_board_throttle_events_total"),
        ("lost", "edge_rt_board_lost"),
    ],
)
def test_what_is_not_known_is_not_there_and_costs_nothing_else(field: str, gone: str) -> None:
    nothing = getattr(BoardReading(0), field)
    sources = on(ORIN, dataclasses.replace(reading(), **{field: nothing}))
    assert series(full()) - series(sources) == {gone}
    assert f" {gone} " not in Exposition(sources).page("")[0].decode()  # nor a family without any


def test_a_sensor_that_reads_zero_is_there() -> None:
    board = BoardReading(0, power_mw=0.0, energy_j=0.0, memory_available_bytes=0)
    found = samples(on(BoardInfo("linux"), board), "edge_rt_board_")
    assert found[one("edge_rt_board_power_watts")] == 0
    assert found[one("edge_rt_board_energy_joules_total")] == 0
    assert found[one("edge_rt_board_memory_available_bytes")] == 0
    assert found[one("edge_rt_board_info", kind="linux")] == 1  # no label of what is not known


def test_no_board_no_families() -> None:
    assert samples(dataclasses.replace(full(), board=lambda: None), "edge_rt_board_") == {}


@pytest.mark.parametrize("state", get_args(LinkState))
def test_a_link_is_in_one_state(state: LinkState) -> None:
    found = samples(dataclasses.replace(full(), link=lambda: link(state)), "edge_rt_mqtt_state")
    assert {dict(labels)["state"]: value for (_, labels), value in found.items()} == {
        one: float(one == state) for one in get_args(LinkState)
    }


def test_what_the_link_counts() -> None:
    found = samples(full(), "edge_rt_mqtt_")
    assert {name: value for (name, labels), value in found.items() if not labels} == {
        "edge_rt_mqtt_spool_records": 7,
        "edge_rt_mqtt_spool_bytes": 4096,
        "edge_rt_mqtt_spool_fault": 1,
        "edge_rt_mqtt_dropped_records_total": 3,
        "edge_rt_mqtt_published_records_total": 1000,
        "edge_rt_mqtt_refused_records_total": 1,
        "edge_rt_mqtt_reconnects_total": 2,
    }


@pytest.mark.parametrize(
    ("status", "fault"),
    [(lambda: LinkStatus("down"), {"edge_rt_mqtt_spool_fault": 0.0}), (LinkStatus, {})],
)
def test_a_link_that_is_off_has_no_spool(
    status: Callable[[], LinkStatus], fault: dict[str, float]
) -> None:
    found = samples(dataclasses.replace(full(), link=status), "edge_rt_mqtt_spool_fault")
    assert {name: value for (name, _), value in found.items()} == fault


def test_the_names_of_open_telemetry_give_the_same_times() -> None:
    found = samples(full(), "")
    theirs = {
        "gen_ai_operation_name": "text_completion",
        "gen_ai_provider_name": "edge_rt",
        "gen_ai_request_model": "demo",
    }
    for name, ours in (
        ("request_duration", "e2e_request_latency"),
        ("time_to_first_token", "time_to_first_token"),
        ("time_per_output_token", "request_time_per_output_token"),
    ):
        of_theirs = {
            (sample[len(f"gen_ai_server_{name}_seconds") :], labels - set(theirs.items())): value
            for (sample, labels), value in found.items()
            if sample.startswith(f"gen_ai_server_{name}_seconds") and labels >= set(theirs.items())
        }
        of_ours = {
            (sample[len(f"edge_rt_{ours}_seconds") :], labels - {("model_name", "demo")}): value
            for (sample, labels), value in found.items()
            if sample.startswith(f"edge_rt_{ours}_seconds")
        }
        assert of_theirs == of_ours
        assert of_theirs["_count", frozenset()] == 1
