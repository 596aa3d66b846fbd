"""A reading while it is being made."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_rt.core import BoardReading
from edge_rt.power.memory import Memory
from edge_rt.power.nodes import NodeError, Nodes


@dataclass(slots=True)
class Draft:
    """What is known so far; fields as in BoardReading.

    What one source has given no later one changes.
    """

    taken_ns: int
    power_mw: float | None = None
    rails_mw: dict[str, float] = field(default_factory=dict)
    temperatures_c: dict[str, float] = field(default_factory=dict)
    clocks_hz: dict[str, float] = field(default_factory=dict)
    loads: dict[str, float] = field(default_factory=dict)
    fans_rpm: dict[str, float] = field(default_factory=dict)
    throttles: dict[str, int] = field(default_factory=dict)
    memory: Memory | None = None
    power_mode: str | None = None
    lost: dict[str, str] = field(default_factory=dict)

    def read_memory(self, nodes: Nodes) -> None:
        """Every Linux has it."""
        try:
            self.memory = Memory.read(nodes)
        except NodeError as error:
            self.lost["memory"] = str(error)

    def fill(self, extra: Extra) -> None:
        """Take what is not known yet; what was lost and is given now is not lost."""
        for kind, values, more in (
            ("rails", self.rails_mw, extra.rails_mw),
            ("temperatures", self.temperatures_c, extra.temperatures_c),
            ("clocks", self.clocks_hz, extra.clocks_hz),
            ("loads", self.loads, extra.loads),
        ):
            for label, value in more.items():
                if label not in values:
                    values[label] = value
                    self.lost.pop(f"{kind}.{label}", None)
        if self.power_mode is None and extra.power_mode is not None:
            self.power_mode = extra.power_mode
            self.lost.pop("power_mode", None)

    def reading(self) -> BoardReading:
        """It, done."""
        memory = self.memory
        return BoardReading(
            taken_ns=self.taken_ns,
            power_mw=self.power_mw,
            rails_mw=self.rails_mw,
            temperatures_c=self.temperatures_c,
            clocks_hz=self.clocks_hz,
            loads=self.loads,
            fans_rpm=self.fans_rpm,
            throttles=self.throttles,
            memory_total_bytes=None if memory is None else memory.total_bytes,
            memory_available_bytes=None if memory is None else memory.available_bytes,
            power_mode=self.power_mode,
            lost=self.lost,
        )


@dataclass(slots=True)
class Extra:
    """What another source than the machine's nodes says; fields as in BoardReading."""

    rails_mw: dict[str, float] = field(default_factory=dict)
    temperatures_c: dict[str, float] = field(default_factory=dict)
    clocks_hz: dict[str, float] = field(default_factory=dict)
    loads: dict[str, float] = field(default_factory=dict)
    power_mode: str | None = None
    l4t: str | None = None
    jetpack: str | None = None
    serial: str | None = None
