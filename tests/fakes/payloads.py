"""What a daemon that knows everything publishes on /telemetry."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from fakes.choices import choice
from fakes.pages import MS, ORIN, full, reading

from edge_rt.core import FinishReason, Request, StepStats
from edge_rt.telemetry.record import Recorder
from edge_rt.telemetry.snapshot import Snapshots

SECOND = 1000 * MS


def telemetry(is_historical: bool = False) -> dict[str, Any]:
    """A record as it arrives: ten seconds in which a request was served."""
    now_ns, board = 0, reading()
    sources = dataclasses.replace(full(), board=lambda: (ORIN, board))
    snapshots = Snapshots(sources, lambda: now_ns)
    now_ns, metrics = 10 * SECOND, sources.metrics
    metrics.on_step(StepStats(0, 3, 0, 30 * MS, 0, sampled_tokens=1))
    metrics.on_step(StepStats(0, 0, 2, 0, 40 * MS, sampled_tokens=2))
    row = choice([2 * SECOND, 3 * SECOND], FinishReason.LENGTH)
    metrics.on_end(Request("r", (1, 2, 3)), [row], 1 * SECOND, 5 * SECOND // 4)
    board = dataclasses.replace(board, energy_j=3725.5, metered_s=310.25)
    made: dict[str, Any] = json.loads(Recorder().make("telemetry", snapshots.take()).payload)
    return made | {"historical": is_historical}
