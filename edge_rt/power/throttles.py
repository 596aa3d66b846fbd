"""How often the hardware has slowed the module down since the first reading."""

from __future__ import annotations

import re
from functools import partial

from edge_rt.power.nodes import Family, Nodes

PATTERNS = (
    "sys/class/hwmon/hwmon*/oc*_event_cnt",
    "sys/devices/platform/soctherm-oc-event/hwmon/hwmon*/oc*_event_cnt",
)
REASONS = {
    "oc1": "oc1_under_voltage",
    "oc2": "oc2_average_over_current",
    "oc3": "oc3_instantaneous_over_current",
}


class Deltas:
    """Counters that began before us, from the first value that each of them had."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._sums: dict[str, int] = {}

    def add(self, values: dict[str, float]) -> dict[str, int]:
        """The growth of each; a counter that has gone backwards has begun again at 0."""
        for name, value in values.items():
            last = self._last.get(name, value)
            self._sums[name] = self._sums.get(name, 0) + int(
                value - last if value >= last else value
            )
            self._last[name] = value
        return {name: self._sums[name] for name in values}


class Throttles(Family):
    """Over-current events of Tegra's soctherm, by reason."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__("throttles")
        self._nodes, self._deltas = nodes, Deltas()

    def find(self) -> None:
        """Look for counters that have come."""
        found = next(filter(None, map(self._nodes.find, PATTERNS)), [])
        for path in found:
            counter = re.sub(r".*/(oc[0-9]+)_event_cnt", r"\1", path)
            label = REASONS.get(counter, counter)
            self.found[label] = partial(self._nodes.number, path, 0, 2**63 - 1)

    def count(self, lost: dict[str, str]) -> dict[str, int]:
        """Events since the first reading, by reason."""
        values: dict[str, float] = {}
        self.read(values, lost)
        return self._deltas.add(values)
