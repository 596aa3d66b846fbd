"""Memory of the machine; on a Jetson the GPU's too."""

from __future__ import annotations

import re
from typing import NamedTuple

from edge_rt.power.nodes import NodeError, Nodes

NODE = "proc/meminfo"


class Memory(NamedTuple):
    """MemAvailable is what a program may still take; MemFree leaves out what caches give back."""

    total_bytes: int
    available_bytes: int

    @classmethod
    def read(cls, nodes: Nodes) -> Memory:
        """NodeError if the two are not there, or cannot be."""
        text = nodes.text(NODE)
        found = dict(re.findall(r"^(MemTotal|MemAvailable): +(\d{1,15}) kB$", text, re.MULTILINE))
        if len(found) < 2:
            raise NodeError(f"{NODE}: no MemTotal or no MemAvailable")
        total, available = int(found["MemTotal"]), int(found["MemAvailable"])
        if not 0 <= available <= total or not total:
            raise NodeError(f"{NODE}: {available} kB of {total} kB cannot be available")
        return cls(total << 10, available << 10)
