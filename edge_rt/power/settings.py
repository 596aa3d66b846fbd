"""Settings of the sensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edge_rt.errors import ConfigError

BoardKind = Literal["auto", "none"]


@dataclass(frozen=True, slots=True)
class BoardSettings:
    """Sensors of the machine: power, temperatures, clocks, throttling."""

    kind: BoardKind = field(
        default="auto",
        metadata={"doc": "`auto` reads what the machine has, `none` nothing."},
    )
    interval_s: float = field(
        default=1.0,
        metadata={"doc": "How often they are read. The sensors of a Jetson change every 0.43 s."},
    )
    root: str = field(
        default="/",
        metadata={
            "doc": "Where `sys`, `proc` and `etc` of the machine lie; in a container they may be "
            "mounted elsewhere."
        },
    )

    def __post_init__(self) -> None:
        if not 0.1 <= self.interval_s <= 3600:
            raise ConfigError(f"interval_s must be 0.1 to 3600, found {self.interval_s:g}")
