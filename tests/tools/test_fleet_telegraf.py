"""tools/fleet/telegraf.conf, as far as it can be checked without Telegraf."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.payloads import telemetry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).parents[2] / "tools/fleet/telegraf.conf"


@pytest.fixture(scope="module")
def consumer() -> dict[str, Any]:
    (found,) = tomllib.loads(FILE.read_text(encoding="utf-8"))["inputs"]["mqtt_consumer"]
    assert isinstance(found, dict)
    return found


def test_a_record_is_kept_until_it_is_written(consumer: dict[str, Any]) -> None:
    assert consumer["qos"] == 1
    assert consumer["persistent_session"] is True
    assert consumer["client_id"]
    assert consumer["max_undelivered_messages"] > 0


def test_a_record_keeps_its_own_time(consumer: dict[str, Any]) -> None:
    assert consumer["json_time_format"] == "unix_ms"
    assert 1.6e12 < telemetry()[consumer["json_time_key"]] < 1e13


def test_all_text_is_taken_as_such(consumer: dict[str, Any]) -> None:
    """Telegraf's JSON parser leaves out what is no number, unless it is named."""
    text = {name for name, value in telemetry().items() if isinstance(value, (str, bool))}
    assert set(consumer["json_string_fields"]) == text | {"model", "scenario"}  # of /bench
    assert "tag_keys" not in consumer  # a record that comes twice would be two


def test_topics_are_ours(consumer: dict[str, Any]) -> None:
    assert consumer["topics"] == ["edge_rt/+/telemetry", "edge_rt/+/bench"]
    (parsing,) = consumer["topic_parsing"]
    topic = ["edge_rt", "jetson-1", "telemetry"]
    for pattern in (parsing["topic"], parsing["measurement"], parsing["tags"]):
        assert len(pattern.split("/")) == len(topic)
    assert topic[parsing["tags"].split("/").index("device")] == "jetson-1"
    assert topic[parsing["measurement"].split("/").index("measurement")] == "telemetry"
