"""Any other machine's sensors: what Linux shows of it, and NVIDIA's boards in it."""

from __future__ import annotations

import time
from collections import Counter

from edge_rt.core import BoardInfo, BoardReading
from edge_rt.power.clocks import Clocks
from edge_rt.power.draft import Draft
from edge_rt.power.fans import Fans
from edge_rt.power.nodes import Nodes
from edge_rt.power.nvml import SCOPE, Nvml
from edge_rt.power.release import Identity
from edge_rt.power.rounds import Rounds
from edge_rt.power.thermal import Temperatures

PRODUCT = "sys/class/dmi/id/product_name"


class LinuxBoard:
    """Nothing is expected of such a machine; what it had once and has no more is lost."""

    def __init__(self, nodes: Nodes, identity: Identity) -> None:
        self._nodes, self._identity = nodes, identity
        self._model = identity.model or nodes.word(PRODUCT)
        self._temperatures, self._clocks = Temperatures(nodes, ()), Clocks(nodes)
        self._fans, self._nvml = Fans(nodes), Nvml(nodes.watch)
        self._rounds, self._is_lost = Rounds(nodes), False
        self._find()

    @property
    def info(self) -> BoardInfo:
        """The model has the GPUs' names in it."""
        gpus = Counter(self._nvml.names).items()
        boards = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in gpus)
        return BoardInfo(
            kind="nvml" if boards else "linux",
            model=", ".join(part for part in (self._model, boards) if part) or None,
            serial=self._identity.serial,
            power_scope=SCOPE if boards else None,
        )

    def read(self) -> BoardReading:
        """One reading; the GPUs' power first, so that its time is theirs."""
        if self._rounds.is_due(is_lost=self._is_lost):
            self._find()
        draft = Draft(time.monotonic_ns())
        self._nvml.read(draft)
        self._temperatures.read(draft.temperatures_c, draft.lost)
        self._clocks.read(draft.clocks_hz, draft.lost)
        self._fans.read(draft.fans_rpm, draft.lost)
        draft.read_memory(self._nodes)
        self._is_lost = bool(draft.lost)
        return draft.reading()

    def close(self) -> None:
        """Close NVML."""
        self._nvml.close()

    def _find(self) -> None:
        for family in (self._nvml, self._temperatures, self._clocks, self._fans):
            family.find()
