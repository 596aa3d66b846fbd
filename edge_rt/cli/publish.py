"""`edge-rt bench --publish FILE`: the result over MQTT, as the daemon's are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_rt.errors import ConfigError

if TYPE_CHECKING:
    from edge_rt.serve.settings import Settings

# What docs/telemetry.md has in a bench record; the rest is for who ran the benchmark.
FIELDS = (
    "scenario",
    "prompt_tokens",
    "max_tokens",
    "samples",
    "tokens",
    "duration_s",
    "latency_ms_p50",
    "latency_ms_p90",
    "latency_ms_p99",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "throughput_tok_s",
    "samples_per_s",
    "warnings",
)


def check(file: Path) -> Settings:
    """The settings; ConfigError if they name no broker or cannot work."""
    from edge_rt.serve import settings
    from edge_rt.telemetry import login

    found = settings.load(file)
    if found.mqtt.host is None:
        raise ConfigError(f"--publish: {file} names no broker; set host in [mqtt]")
    login.check(found.mqtt)
    return found


def result(file: Path, measured: dict[str, Any]) -> str:
    """Publish a benchmark's result; its topic. PublishError if the broker does not take it."""
    from edge_rt.telemetry import oneshot
    from edge_rt.telemetry.device import default_device

    found = check(file)
    device = found.mqtt.device or default_device(Path(found.board.root))
    served = measured.get("bundle") or measured["url"]
    fields = {name: measured[name] for name in FIELDS if name in measured}
    return oneshot.publish(found.mqtt, device, "bench", {"model": Path(served).name, **fields})
