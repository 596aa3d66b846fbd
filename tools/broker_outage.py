"""What arrives of a daemon's records when its broker stands still and is killed, for minutes each.

    python tools/broker_outage.py NULL_BUNDLE --seconds 180 --json broker_outage.json

A real daemon and a real mosquitto with the settings' defaults, but for figures every second. The
broker is stopped (SIGSTOP) for so long, continued, killed, started again after as long, and in the
end the daemon is told to end. What a subscriber has then is counted by (boot_id, topic, seq).
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import command
from command import progress
from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from telemetry_cost import Broker

from edge_rt.bench import daemon
from edge_rt.errors import EngineError

SETTINGS = """\
[telemetry]
interval_s = 1.0

[mqtt]
host = "127.0.0.1"
port = {port}
device = "box"
spool_file = "{directory}/spool.sqlite"
"""
# What the broker has acknowledged may not get lost with it, or the subscriber would miss it.
LASTING = ("persistence true", "autosave_interval 1", "autosave_on_changes true")
WINDOW = 20
CALM_S, PATIENCE_S = 10.0, 300.0


class Ears:
    """All that a broker has forwarded, over its restarts: it keeps the subscription."""

    def __init__(self, port: int) -> None:
        self.records: list[dict[str, Any]] = []
        self._client = Client(
            CallbackAPIVersion.VERSION2, "ears", protocol=MQTTProtocolVersion.MQTTv5
        )
        self._client.reconnect_delay_set(1, 1)
        self._client.on_connect = lambda client, *_: client.subscribe("edge_rt/box/+", qos=1)
        self._client.on_message = self._on_message
        session = Properties(PacketTypes.CONNECT)
        session.SessionExpiryInterval = 86_400
        self._client.connect("127.0.0.1", port, keepalive=10, clean_start=False, properties=session)
        self._client.loop_start()

    def _on_message(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        payload = json.loads(message.payload)
        if "seq" in payload:
            kind = message.topic.rpartition("/")[2]
            self.records.append(payload | {"kind": kind, "heard_s": time.time()})

    def close(self) -> None:
        """Hear no more."""
        self._client.disconnect()
        self._client.loop_stop()

    def wait_for(self, event: str) -> None:
        """Until an event is heard; EngineError if it does not come."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(record.get("event") == event for record in list(self.records)):
            if time.monotonic() > deadline:
                raise EngineError(f"the event '{event}' was not heard within {PATIENCE_S:g} s")
            time.sleep(0.1)


def judge(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and whether each topic is complete and each of its two kinds in order."""
    first: dict[tuple[str, int], dict[str, Any]] = {}
    for record in records:
        first.setdefault((record["kind"], record["seq"]), record)
    sequences: dict[str, list[int]] = defaultdict(list)
    for kind, seq in first:
        sequences[kind].append(seq)
    live = [one for one in first.values() if not one["historical"]]
    return {
        "records": len(first),
        "duplicates": len(records) - len(first),
        "historical": len(first) - len(live),
        "missing": sum(max(found) - len(found) for found in sequences.values()),
        "in_order": all(
            seqs == sorted(seqs)
            for kind in sequences
            for mark in (True, False)
            for seqs in [
                [s for (k, s), one in first.items() if (k, one["historical"]) == (kind, mark)]
            ]
        ),
        "live_delay_s_max": max(one["heard_s"] - one["time_ms"] * 1e-3 for one in live),
        "by_topic": dict(Counter(kind for kind, _ in first)),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    with (
        tempfile.TemporaryDirectory() as name,
        Broker(Path(name), *LASTING, f"persistence_location {name}/") as broker,
    ):
        ears = Ears(broker.port)
        settings = Path(name) / "settings.toml"
        settings.write_text(SETTINGS.format(port=broker.port, directory=name), encoding="utf-8")
        with daemon.started(options.bundle, "--config", str(settings)):
            time.sleep(CALM_S)
            progress("the broker stands still")
            broker.process.send_signal(signal.SIGSTOP)
            time.sleep(options.seconds)
            broker.process.send_signal(signal.SIGCONT)
            progress("it goes on")
            time.sleep(6 * CALM_S)
            progress("it is killed")
            broker.kill()
            time.sleep(options.seconds)
            broker.start()
            progress("it is there again")
            time.sleep(7 * CALM_S)  # the daemon's longest wait is a minute
        ears.wait_for("stopped")
        ears.close()
        return {"seconds_each": options.seconds, "window": WINDOW, **judge(ears.records)}


def main() -> None:
    """Measure, and write one JSON object to stdout or to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, metavar="NULL_BUNDLE")
    parser.add_argument("--seconds", type=float, default=180.0, metavar="S")
    command.run(parser, measure)


if __name__ == "__main__":
    main()
