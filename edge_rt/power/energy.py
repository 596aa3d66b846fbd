"""Energy, as the integral of power over time."""

from __future__ import annotations

from dataclasses import replace

from edge_rt.core import BoardReading


class Energy:
    """Trapezoids between readings that are at most `gap_s` apart and whose power is known."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._last: BoardReading | None = None
        self._sum_j = 0.0
        self._sum_s = 0.0

    def add(self, reading: BoardReading) -> BoardReading:
        """It with `energy_j` and `metered_s`; as it is if its power is not known."""
        last, power_mw = self._last, reading.power_mw
        self._last = reading
        if power_mw is None:
            return reading
        if last is not None and last.power_mw is not None:
            passed_s = (reading.taken_ns - last.taken_ns) * 1e-9
            if 0 < passed_s <= self._gap_s:
                self._sum_j += (last.power_mw + power_mw) / 2e3 * passed_s
                self._sum_s += passed_s
        return replace(reading, energy_j=self._sum_j, metered_s=self._sum_s)
