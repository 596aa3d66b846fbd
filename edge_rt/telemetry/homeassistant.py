"""What Home Assistant is told so that it shows a device: its MQTT device discovery (2024.12 on).

A sensor with a unit or a state class keeps its value when a template gives nothing, and becomes
unknown when it gives None. So an old record changes nothing, and a figure that a new one lacks is
not shown as if it were still so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import edge_rt

EXPIRES_AFTER_INTERVALS = 3

# By kind of board: the zone that tells most, and its GPU, the first of several.
_ZONE_AND_GPU = {"jetson": ("tj", "gpu"), "nvml": ("gpu0", "gpu0")}

Component = dict[str, Any]


def discovery(base: str, device: str, info: Mapping[str, Any]) -> tuple[str, str]:
    """Topic and payload of the retained message that announces the device.

    `info` is what /info says; the board's sensors are announced once it says what the board is.
    """
    identity, topic = _identity(device), f"{base}/{device}"
    expires_s = max(1, round(EXPIRES_AFTER_INTERVALS * float(info["interval_s"])))
    components = {
        key: {"platform": "sensor", "unique_id": f"{identity}_{key}", "expire_after": expires_s}
        | component
        for key, component in _components(info)
    }
    components["status"] = {  # of a retained topic, so it does not expire
        "platform": "sensor",
        "unique_id": f"{identity}_status",
        "name": "Status",
        "state_topic": f"{topic}/state",
        "value_template": "{{ value_json.state }}",
    }
    is_online = "{{ 'offline' if value_json.state == 'offline' else 'online' }}"
    payload = {
        "device": _device(identity, device, info),
        "origin": {"name": "edge_rt", "sw_version": edge_rt.__version__},
        "availability": [{"topic": f"{topic}/state", "value_template": is_online}],
        "state_topic": f"{topic}/telemetry",
        "qos": 1,
        "components": components,
    }
    return f"homeassistant/device/{identity}/config", json.dumps(payload, separators=(",", ":"))


def _identity(device: str) -> str:
    """The device's id: Home Assistant takes fewer characters than a topic of ours."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", device)
    if plain != device:  # two devices may not become one
        plain += f"-{hashlib.sha256(device.encode()).hexdigest()[:8]}"
    return f"edge_rt-{plain}"


def _device(identity: str, device: str, info: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "identifiers": [identity],
        "name": device,
        "model": info.get("board_model"),
        "serial_number": info.get("board_serial"),
        "sw_version": edge_rt.__version__,
    }
    return {name: value for name, value in found.items() if value is not None}


def _components(info: Mapping[str, Any]) -> Iterator[tuple[str, Component]]:
    """Key and options of each sensor of /telemetry."""
    diagnostic = {"entity_category": "diagnostic"}
    total = {"state_class": "total_increasing"}
    ms = {"unit_of_measurement": "ms", "device_class": "duration"}
    memory = {"unit_of_measurement": "B", "device_class": "data_size"}
    for key, component in (
        ("requests_running", _number("Requests running")),
        ("requests_waiting", _number("Requests waiting")),
        ("requests_finished_total", _number("Requests finished") | total),
        ("generation_tok_s", _number("Generation") | {"unit_of_measurement": "tok/s"}),
        ("ttft_ms_p50", _number("Time to first token (median)") | ms),
        ("latency_ms_p50", _number("Latency (median)") | ms),
        ("kv_cache_usage", _number("Key-value cache", " * 100") | {"unit_of_measurement": "%"}),
        ("memory_process_bytes", _number("Process memory") | memory | diagnostic),
        ("spool_records", _number("Records waiting") | diagnostic),
        ("dropped_records_total", _number("Records dropped") | total | diagnostic),
        *_of_the_board(info),
    ):
        template = component["value_template"]
        yield key, component | {"value_template": template.replace("FIGURE", f"value_json.{key}")}


def _of_the_board(info: Mapping[str, Any]) -> Iterator[tuple[str, Component]]:
    kind = info.get("board_kind")
    if "power_scope" in info:
        yield (
            "power_mw",
            _number("Power", " / 1000") | {"unit_of_measurement": "W", "device_class": "power"},
        )
        yield (
            "energy_j_total",  # Wh, which Home Assistant has known for longer than J
            _number("Energy", " / 3600")
            | {"unit_of_measurement": "Wh", "device_class": "energy"}
            | {"state_class": "total_increasing"},
        )
    if kind in _ZONE_AND_GPU:
        zone, gpu = _ZONE_AND_GPU[kind]
        yield (
            f"temperature_{zone}_c",
            _number("Temperature") | {"unit_of_measurement": "°C", "device_class": "temperature"},
        )
        yield f"load_{gpu}", _number("GPU load", " * 100") | {"unit_of_measurement": "%"}
    if kind == "jetson":
        yield "power_mode", _text("Power mode", "None")
    if kind is not None:
        yield "lost", _text("Sensors lost", "'none'") | {"entity_category": "diagnostic"}


def _number(name: str, scale: str = "") -> Component:
    return {
        "name": name,
        "state_class": "measurement",
        "value_template": (
            "{% if not value_json.historical | default(false) %}"
            f"{{{{ (FIGURE{scale}) | round(3) if FIGURE is number else None }}}}"
            "{% endif %}"
        ),
    }


def _text(name: str, absent: str) -> Component:
    """Text has to be given again to stay; `absent` is what it is if a live record lacks it."""
    return {
        "name": name,
        "value_template": (
            "{% if not value_json.historical | default(false) %}"
            f"{{{{ (FIGURE | default({absent}, true) | string)[:255] }}}}"
            "{% elif this.state not in ('unavailable', 'unknown') %}{{ this.state }}"
            "{% else %}None{% endif %}"
        ),
    }
