"""A Jetson's sensors, from sysfs; from tegrastats and jtop what sysfs does not show."""

from __future__ import annotations

import time

from edge_rt.core import BoardInfo, BoardReading
from edge_rt.power.clocks import Clocks, Loads
from edge_rt.power.draft import Draft
from edge_rt.power.fans import Fans
from edge_rt.power.ina3221 import AGX_ORIN, Rails, Total
from edge_rt.power.jtop import Jtop
from edge_rt.power.nodes import NodeError, Nodes
from edge_rt.power.nvpmodel import PowerMode
from edge_rt.power.release import JETPACKS, Identity, l4t
from edge_rt.power.rounds import Rounds
from edge_rt.power.tegrastats import Tegrastats
from edge_rt.power.thermal import Temperatures
from edge_rt.power.throttles import Throttles

# By module or chip: the rails whose sum is the module's power, which it must have.
TOTALS = (("p3701", AGX_ORIN), ("p3767", ("VDD_IN",)), ("tegra264", ("VIN",)))


class JetsonBoard:
    """Every node is read on its own; what the model must have and has not is lost."""

    def __init__(self, nodes: Nodes, identity: Identity, interval_s: float) -> None:
        self._nodes, self._identity = nodes, identity
        rails = next((rails for part, rails in TOTALS if identity.has(part)), None)
        is_orin = identity.has("tegra234")  # of other chips less is known
        gpu, tj = (("gpu",), ("tj",)) if is_orin else ((), ())
        self._total = Total(rails)
        self._rails = Rails(nodes, rails or ())
        self._temperatures = Temperatures(nodes, tj)
        self._clocks = Clocks(nodes, gpu, has_emc=True)
        self._loads = Loads(nodes, self._clocks, gpu)
        self._fans, self._throttles = Fans(nodes), Throttles(nodes)
        self._mode = PowerMode(nodes)
        self._jtop = Jtop(nodes.root)
        self._tegrastats = Tegrastats(interval_s)
        self._l4t: str | None = None
        self._lost: dict[str, str] = {}  # that is looked for with the directories
        self._rounds, self._is_lost = Rounds(nodes), False
        self._find()

    @property
    def info(self) -> BoardInfo:
        """As the device tree and the release have it; jtop where they do not."""
        jtop = self._jtop.latest
        l4t, jetpack = self._l4t, JETPACKS.get(self._l4t or "")
        return BoardInfo(
            kind="jetson",
            model=self._identity.model,
            serial=self._identity.serial or (jtop.serial if jtop else None),
            l4t=l4t or (jtop.l4t if jtop else None),
            jetpack=jetpack or (jtop.jetpack if jtop else None),
            power_scope=self._total.scope,
        )

    def read(self) -> BoardReading:
        """One reading; rails first, so that its time is theirs."""
        if self._rounds.is_due(is_lost=self._is_lost):
            self._find()
        draft = Draft(time.monotonic_ns(), lost=dict(self._lost))
        lost = draft.lost
        self._rails.read(draft.rails_mw, lost)
        self._temperatures.read(draft.temperatures_c, lost)
        self._clocks.read(draft.clocks_hz, lost)
        self._loads.read(draft.loads, lost)
        self._fans.read(draft.fans_rpm, lost)
        draft.throttles = self._throttles.count(lost)
        draft.power_mode = self._mode.read(lost)
        draft.read_memory(self._nodes)
        if self._tegrastats.is_there and not self._rails.found:
            self._tegrastats.fill(draft)
        self._jtop.fill(draft)
        self._total.choose(set(draft.rails_mw))
        draft.power_mw = self._total.read(draft.rails_mw, lost)
        self._is_lost = bool(lost)
        return draft.reading()

    def close(self) -> None:
        """End the tools and the client."""
        self._tegrastats.close()
        self._mode.close()
        self._jtop.close()

    def _find(self) -> None:
        if self._identity.missing():
            self._identity = Identity.read(self._nodes)
        self._lost = self._identity.missing()
        try:
            self._l4t = l4t(self._nodes)
        except NodeError as error:
            if self._l4t is None and not error.is_absent:
                self._lost["info.l4t"] = str(error)
        for family in (
            self._rails,
            self._temperatures,
            self._clocks,
            self._loads,
            self._fans,
            self._throttles,
            self._mode,
        ):
            family.find()
