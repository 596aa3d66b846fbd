"""Percentiles as MLPerf's LoadGen takes them."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(values: Sequence[float], q: float) -> float:
    """The value that `q` percent of the others lie below; no mean of two."""
    return sorted(values)[int(len(values) * (q / 100))]
