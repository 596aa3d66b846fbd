"""When to look for devices again."""

from __future__ import annotations

import os
import time

from edge_rt.power.nodes import NodeError, Nodes

FIND_S = 10.0
# A driver that loads adds a directory to one of them.
CLASSES = (
    "sys/class/hwmon",
    "sys/class/thermal",
    "sys/class/devfreq",
    "sys/devices/system/cpu/cpufreq",
    "sys/bus/pci/drivers/nvidia",
)


class Rounds:
    """Due every FIND_S, but only if something is lost or a driver has come or gone.

    To look at every label costs as much as ten readings.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._last_s = time.monotonic()
        self._seen = self._listings()

    def is_due(self, *, is_lost: bool) -> bool:
        """Whether to look now."""
        now_s = time.monotonic()
        if now_s - self._last_s < FIND_S:
            return False
        self._last_s = now_s
        seen, self._seen = self._seen, self._listings()
        return is_lost or seen != self._seen

    def _listings(self) -> list[list[str]]:
        return [self._listing(directory) for directory in CLASSES]

    def _listing(self, directory: str) -> list[str]:
        path = os.path.join(self._nodes.root, directory)  # noqa: PTH118
        try:
            return sorted(self._nodes.watch.ask(directory, lambda: os.listdir(path)))  # noqa: PTH208
        except (OSError, NodeError):
            return []
