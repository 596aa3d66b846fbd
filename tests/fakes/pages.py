"""A daemon's figures in every state: what /metrics is made of."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import parser

from edge_rt.core import BoardInfo, BoardReading, Limits, Load, StepStats
from edge_rt.telemetry.metrics import Metrics
from edge_rt.telemetry.prometheus import Exposition
from edge_rt.telemetry.sources import Sources
from edge_rt.telemetry.status import LinkState, LinkStatus

LIMITS = Limits(8, 32, 512, 128, 16, 64, 1024, 3072)
STATUSES = ("loading", "ready", "draining", "failed")
MS = 1_000_000
ORIN = BoardInfo("jetson", "Jetson AGX Orin", "1423", "36.4.7", "6.2.1", "module rails")


def reading() -> BoardReading:
    """All that a board can say, of which one thing is lost."""
    return BoardReading(
        taken_ns=time.monotonic_ns(),
        power_mw=12_500.0,
        rails_mw={"VDD_GPU_SOC": 7000.0, "VDD_CPU_CV": 1500.0, "VIN_SYS_5V0": 4000.0},
        energy_j=3600.5,
        metered_s=300.25,
        temperatures_c={"tj": 52.5, "cpu": 50.25},
        clocks_hz={"gpu": 1_300_500_000.0},
        loads={"gpu": 0.75, "emc": 0.5},
        fans_rpm={"fan": 1800.0},
        throttles={"under-voltage": 0, "over-current": 2},
        memory_total_bytes=64 << 30,
        memory_available_bytes=40 << 30,
        power_mode="MAXN",
        lost={"temperature_cv0": "EAGAIN"},
    )


def traffic() -> Metrics:
    """What some requests and one failed step left behind."""
    metrics = Metrics()
    metrics.on_step(StepStats(0, 100, 2, 30 * MS, 4 * MS, sampled_tokens=3))
    metrics.on_step(StepStats(0, 0, 0, 0, 0, sampled_tokens=0, failed=True))
    for histogram in (metrics.queue_s, metrics.ttft_s, metrics.tpot_s, metrics.latency_s):
        histogram.observe(0.25)
    metrics.request_prompt_tokens.observe(100)
    metrics.request_generation_tokens.observe(16)
    metrics.finished["length"] += 1
    metrics.answered[200] += 1
    metrics.answered[429] += 1
    return metrics


def link(state: LinkState = "connected") -> LinkStatus:
    """A link that has known trouble."""
    return LinkStatus(state, "", 7, 4096, 3, 1000, 2, "disk full", 1)


def full() -> Sources:
    """All that can be said."""
    return Sources(
        traffic(),
        "demo",
        STATUSES,
        status=lambda: "ready",
        engine=lambda: (LIMITS, Load(3, 8, 12, 5)),
        board=lambda: (ORIN, reading()),
        link=link,
    )


def states() -> Iterator[tuple[str, Sources]]:
    """A daemon's states by name, from nothing known to everything."""
    yield "loading", Sources(Metrics(), "demo", STATUSES, status=lambda: "loading")
    yield (
        "no sensors",
        Sources(
            Metrics(),
            'a model\'s "name" \\ with\nmarks',
            STATUSES,
            status=lambda: "ready",
            engine=lambda: (LIMITS, Load(0, 0, 0, 0)),
            board=lambda: (BoardInfo("none"), BoardReading(time.monotonic_ns())),
            link=lambda: LinkStatus("down", "refused"),
        ),
    )
    yield "everything", full()


def series(sources: Sources) -> set[str]:
    """The names that a query may ask for."""
    page = Exposition(sources).page("")[0].decode()
    return {
        sample.name
        for family in parser.text_string_to_metric_families(page)
        for sample in family.samples
    }
