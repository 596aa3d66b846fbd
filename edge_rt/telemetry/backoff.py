"""How long to wait before the next try."""

from __future__ import annotations

import random
from typing import NamedTuple


class Delays(NamedTuple):
    """From `first_s`, doubled at each try up to `most_s`, times a random factor.

    Factors from 0 to 1 ("full jitter") spread a fleet that lost its broker at one moment; a factor
    of 1 or more keeps a least distance to a broker that said no.
    """

    first_s: float
    most_s: float
    least_factor: float = 0.0
    most_factor: float = 1.0


class Backoff:
    """One row of tries."""

    def __init__(self, delays: Delays) -> None:
        self._delays, self._tries = delays, 0

    def next_s(self) -> float:
        """The wait after one more failure."""
        first_s, most_s, least, most = self._delays
        delay_s = min(most_s, first_s * 2 ** min(self._tries, 30))
        self._tries += 1
        return delay_s * random.uniform(least, most)  # noqa: S311 - no secret

    def reset(self) -> None:
        """It worked."""
        self._tries = 0
