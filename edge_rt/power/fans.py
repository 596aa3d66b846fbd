"""Fans: how fast they turn."""

from __future__ import annotations

from functools import partial

from edge_rt.power.nodes import Family, Nodes

PATTERNS = ("sys/class/hwmon/hwmon*/rpm", "sys/class/hwmon/hwmon*/fan*_input")
MAX_RPM = 100_000


class Fans(Family):
    """Revolutions per minute, by the fan's label or its driver's name."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__("fans")
        self._nodes = nodes

    def find(self) -> None:
        """Look for fans that have come; NVIDIA's tachometer calls its node `rpm`."""
        for path in (path for pattern in PATTERNS for path in self._nodes.find(pattern)):
            directory, _, node = path.rpartition("/")
            driver = self._nodes.word(f"{directory}/name") or "fan"
            fan = node.removesuffix("_input")
            label = driver if fan in {"rpm", "fan1"} else f"{driver}_{fan}"
            if node != "rpm":
                label = self._nodes.word(f"{directory}/{fan}_label") or label
            self.found[label] = partial(self._nodes.number, path, 0, MAX_RPM)
