"""From logits to a token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_rt.core import SamplingParams


def sample(logits: npt.NDArray[np.float32], sampling: SamplingParams) -> int:
    """The next token for `logits` [vocab]: the likeliest, the lower token on a tie."""
    del sampling  # greedy is the only way so far
    return int(logits.argmax())
