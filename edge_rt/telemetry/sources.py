"""Where the figures come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_rt.core import BoardInfo, BoardReading, Limits, Load
from edge_rt.telemetry.metrics import Metrics
from edge_rt.telemetry.status import LinkStatus


@dataclass(frozen=True, slots=True)
class Sources:
    """What a daemon knows; each function may be called from any thread and answers at once.

    `status` is one of `statuses`. `engine` gives None until there is one. `board` gives what the
    machine is and its last reading, None where no sensors are read.
    """

    metrics: Metrics
    model: str
    statuses: tuple[str, ...]
    status: Callable[[], str]
    engine: Callable[[], tuple[Limits, Load] | None] = lambda: None
    board: Callable[[], tuple[BoardInfo, BoardReading] | None] = lambda: None
    link: Callable[[], LinkStatus] = LinkStatus
