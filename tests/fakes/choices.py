"""Rows that have ended at a given time, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from edge_rt.choice import Choice
from edge_rt.core import FinishReason, SampledToken
from edge_rt.text import TextStream


def choice(times_ns: Sequence[int], finish: FinishReason) -> Choice:
    """A row whose tokens came at these times and which ended a millisecond after the last."""
    first, last = (times_ns[0], times_ns[-1]) if times_ns else (None, None)
    return Choice(
        row=0,
        stream=cast("TextStream", None),  # it is not read any more
        tokens=[SampledToken(1) for _ in times_ns],
        finish=finish,
        first_token_ns=first,
        last_token_ns=last,
        ended_ns=(last or 0) + 1_000_000,
    )
