"""NVIDIA's boards in a computer, through NVML; on a Jetson it knows next to nothing.

What a board does not support is not there: NVML says so by an error, or by a number that cannot be
(nv-monitor#10).
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from edge_rt.power.draft import Draft
from edge_rt.power.nodes import Family, NodeError
from edge_rt.power.watch import Watch

SCOPE = "GPU boards"
# Bits of nvmlClocksEventReasons that slow a board down against its will (nvml.h).
THROTTLES = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
MAX_MW, MAX_C, MAX_MHZ = 5_000_000, 200, 20_000


class Nvml:
    """All boards, by the names gpu0, gpu1 … in NVML's order."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._library: ModuleType | None = None
        self.names: list[str] = []
        self._rails = Family("rails")
        self._temperatures, self._clocks = Family("temperatures"), Family("clocks")
        self._loads, self._reasons = Family("loads"), Family("throttles")
        self._counts: Counter[str] = Counter()
        self._held: dict[str, int] = {}
        self._had_power = False

    def find(self) -> None:
        """Open the library, if it is there and its driver runs; either may come later."""
        if self._library is not None:
            return
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            boards = self._watch.ask("nvml", partial(_open, library))
        except (NodeError, library.NVMLError):
            return
        if boards:
            self._library = library
            for number, (name, board) in enumerate(boards):
                self.names.append(name)
                self._add(library, f"gpu{number}", board)

    def read(self, draft: Draft) -> None:
        """Add what the boards say."""
        if self._library is None:
            return
        lost = draft.lost
        self._rails.read(draft.rails_mw, lost)
        self._temperatures.read(draft.temperatures_c, lost)
        self._clocks.read(draft.clocks_hz, lost)
        self._loads.read(draft.loads, lost)
        self._count(draft)
        missing = self._rails.found.keys() - draft.rails_mw.keys()
        if not missing:
            draft.power_mw = sum(draft.rails_mw[label] for label in self._rails.found)
            self._had_power = True
        elif self._had_power:
            lost["power"] = f"not known without {', '.join(sorted(missing))}"

    def close(self) -> None:
        """Close the library."""
        library, self._library = self._library, None
        if library is not None:
            try:
                library.nvmlShutdown()
            except library.NVMLError:
                return

    def _count(self, draft: Draft) -> None:
        """A throttle counts once each time it sets in, on any board."""
        values: dict[str, float] = {}
        self._reasons.read(values, draft.lost)
        for board, bits in values.items():
            before = self._held.get(board, int(bits))
            self._counts.update(dict.fromkeys(THROTTLES.values(), 0))
            self._counts.update(
                name for bit, name in THROTTLES.items() if int(bits) & bit and not before & bit
            )
            self._held[board] = int(bits)
        if values:
            draft.throttles.update(self._counts)

    def _add(self, library: ModuleType, label: str, board: Any) -> None:
        def asked(
            call: Callable[[], float], highest: float, factor: float = 1.0
        ) -> Callable[[], float]:
            return partial(self._ask, library, label, call, highest, factor)

        power, heat = library.nvmlDeviceGetPowerUsage, library.nvmlDeviceGetTemperature
        clock, busy = library.nvmlDeviceGetClockInfo, library.nvmlDeviceGetUtilizationRates
        reasons = library.nvmlDeviceGetCurrentClocksThrottleReasons
        self._rails.found[label] = asked(partial(power, board), MAX_MW)
        self._temperatures.found[label] = asked(
            partial(heat, board, library.NVML_TEMPERATURE_GPU), MAX_C
        )
        self._clocks.found[label] = asked(
            partial(clock, board, library.NVML_CLOCK_SM), MAX_MHZ, 1e6
        )
        self._clocks.found[f"{label}_memory"] = asked(
            partial(clock, board, library.NVML_CLOCK_MEM), MAX_MHZ, 1e6
        )
        self._loads.found[label] = asked(lambda: busy(board).gpu, 100, 0.01)
        self._loads.found[f"{label}_memory"] = asked(lambda: busy(board).memory, 100, 0.01)
        self._reasons.found[label] = asked(partial(reasons, board), 2**63)

    def _ask(
        self,
        library: ModuleType,
        label: str,
        call: Callable[[], float],
        highest: float,
        factor: float,
    ) -> float:
        try:
            value = self._watch.ask("nvml", call)
        except library.NVMLError as error:
            is_off = error.value in {library.NVML_ERROR_NOT_SUPPORTED, library.NVML_ERROR_NO_DATA}
            raise NodeError(f"NVML, {label}: {error}", is_off=is_off) from None
        if not 0 <= value <= highest:
            raise NodeError(f"NVML, {label}: {value} cannot be", is_off=True)
        return value * factor


def _open(library: ModuleType) -> list[tuple[str, Any]]:
    library.nvmlInit()
    boards = (library.nvmlDeviceGetHandleByIndex(n) for n in range(library.nvmlDeviceGetCount()))
    found = [(_text(library.nvmlDeviceGetName(board)), board) for board in boards]
    return [(name, board) for name, board in found if "nvgpu" not in name]


def _text(name: str | bytes) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name
