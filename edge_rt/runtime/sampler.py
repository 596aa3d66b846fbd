"""From logits to a token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_rt.core import SamplingParams
from edge_rt.errors import EngineError


def sample(logits: npt.NDArray[np.float32], sampling: SamplingParams) -> int:
    """The next token for `logits` [vocab]: the likeliest, the lower token on a tie.

    EngineError if the logits are not finite: whatever token they gave would mean nothing.
    """
    del sampling  # greedy is the only way so far
    token = int(logits.argmax())
    if not np.isfinite(logits[token]):  # argmax finds the first NaN, else the largest
        raise EngineError(
            "the engine's logits are not finite: the bundle or the engine is damaged; "
            "check it with edge-rt verify"
        )
    return token
