"""Temperatures of the thermal zones, by the zone's name."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

from edge_rt.power.nodes import Family, NodeError, Nodes

_SUFFIX = re.compile(r"[-_](therm|thermal|tegra)$")


def zone_label(name: str) -> str:
    """One name for one zone, whichever JetPack: `CPU-therm` and `cpu-thermal` are cpu."""
    return _SUFFIX.sub("", name.lower())


class Temperatures(Family):
    """Zones in degrees Celsius."""

    def __init__(self, nodes: Nodes, expected: tuple[str, ...]) -> None:
        super().__init__("temperatures", expected)
        self._nodes = nodes
        self._labels: dict[str, str] = {}

    def find(self) -> None:
        """Look for zones that have come."""
        seen: Counter[str] = Counter()
        for zone in self._nodes.find("sys/class/thermal/thermal_zone*"):
            name = self._nodes.word(f"{zone}/type")
            label = self._labels.get(zone) if name is None else zone_label(name)
            if label is None:
                continue
            self._labels[zone] = label
            seen[label] += 1
            if seen[label] > 1:  # as acpitz often is
                label = f"{label}_{seen[label]}"
            self.found[label] = partial(self._zone_c, f"{zone}/temp")

    def _zone_c(self, path: str) -> float:
        value = self._nodes.number(path, -256_000, 200_000)
        if value <= -100_000:  # -256 is what JetPack 5 says of a part that is powered down
            raise NodeError(f"{path}: {value}", is_off=value == -256_000)
        return value / 1e3
