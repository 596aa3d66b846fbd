"""What the daemon is, and what it is doing: shared by its routes, its signals and its log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from edge_rt.core import BoardInfo, BoardReading
from edge_rt.serve.cache import ResponseCache
from edge_rt.serve.completions import Completions
from edge_rt.serve.front import Front
from edge_rt.serve.keys import Keys
from edge_rt.serve.settings import Settings
from edge_rt.telemetry.metrics import Metrics
from edge_rt.telemetry.sources import Sources
from edge_rt.telemetry.status import LinkStatus

Status = Literal["loading", "ready", "draining", "failed"]


@dataclass(slots=True)
class State:
    """Requests are taken only while it is `ready`.

    `model` is the name that requests may give. `keys` None asks nobody for one. `of_key` counts the
    requests that each key has alive. `board` and `link` are there once sensors are read and MQTT is
    spoken.
    """

    settings: Settings = field(default_factory=Settings)
    model: str = "model"
    keys: Keys | None = None
    status: Status = "loading"
    started_at: int = field(default_factory=lambda: int(time.time()))
    front: Front | None = None
    completions: Completions | None = None
    of_key: Counter[str] = field(default_factory=Counter)
    cache: ResponseCache = field(default_factory=lambda: ResponseCache(0))
    metrics: Metrics = field(default_factory=Metrics)
    board: Callable[[], tuple[BoardInfo, BoardReading] | None] = lambda: None
    link: Callable[[], LinkStatus] = LinkStatus

    def sources(self) -> Sources:
        """What telemetry may ask, at any time."""
        return Sources(
            self.metrics,
            self.model,
            get_args(Status),
            status=lambda: self.status,
            engine=lambda: None if self.front is None else self.front.engine,
            board=lambda: self.board(),  # noqa: PLW0108 - it is set later
            link=lambda: self.link(),  # noqa: PLW0108
        )
