"""What the daemon is, and what it is doing: shared by its routes, its signals and its log."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from edge_rt.serve.cache import ResponseCache
from edge_rt.serve.completions import Completions
from edge_rt.serve.front import Front
from edge_rt.serve.keys import Keys
from edge_rt.serve.settings import Settings
from edge_rt.telemetry.metrics import Metrics

Status = Literal["loading", "ready", "draining", "failed"]


@dataclass(slots=True)
class State:
    """Requests are taken only while it is `ready`.

    `model` is the name that requests may give. `keys` None asks nobody for one. `of_key` counts the
    requests that each key has alive.
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
