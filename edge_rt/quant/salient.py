"""Which input channels stay in FP16.

By mean activation magnitude, not by weight magnitude: Lin et al., AWQ (2023), table 1.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def salient_count(channels: int, fraction: float) -> int:
    """How many of `channels` stay in FP16: rounded up, at least one unless the fraction is 0."""
    # The epsilon keeps 0.07 * 100 = 7.000000000000001 from becoming 8.
    return max(1, math.ceil(fraction * channels - 1e-9)) if fraction > 0 else 0


def salient_channels(magnitude: npt.NDArray[np.float64], fraction: float) -> npt.NDArray[np.int32]:
    """The channels of largest `magnitude` [channels], ascending; ties go to the lower channel."""
    order = np.argsort(-magnitude, kind="stable")
    return np.sort(order[: salient_count(len(magnitude), fraction)]).astype(np.int32)
