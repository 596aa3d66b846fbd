"""Mean power and energy per token, from a meter that may have been silent for a while."""

from __future__ import annotations

from typing import NamedTuple

from edge_rt.core import BoardReading

LEAST_SHARE = 0.8  # of the time that the power was known in, or it is not that of the tokens


class Metered(NamedTuple):
    """Energy in J, and the seconds in which it was metered."""

    energy_j: float
    metered_s: float

    @classmethod
    def of(cls, reading: BoardReading | None) -> Metered | None:
        """Since the first reading; None without a meter."""
        if reading is None or reading.energy_j is None or reading.metered_s is None:
            return None
        return cls(reading.energy_j, reading.metered_s)

    def since(self, before: Metered) -> Metered:
        """What was added after `before`."""
        return Metered(self.energy_j - before.energy_j, self.metered_s - before.metered_s)

    @property
    def power_mw(self) -> float | None:
        """The mean; None if nothing was metered."""
        return 1e3 * self.energy_j / self.metered_s if self.metered_s > 0 else None

    def j_per_tok(self, passed_s: float, tokens: int) -> float | None:
        """At the mean power over `passed_s`; None for no token, or if too little was metered."""
        power_mw = self.power_mw
        if power_mw is None or tokens < 1 or self.metered_s < LEAST_SHARE * passed_s:
            return None
        return power_mw * 1e-3 * passed_s / tokens
