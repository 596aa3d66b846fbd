from __future__ import annotations

import pytest

from edge_rt.bench.report import summarize
from edge_rt.bench.timer import Run, Timing
from edge_rt.telemetry.percentile import percentile

MS = 1_000_000


def test_figures_of_known_timings() -> None:
    timings = (
        Timing("a", 0, [10 * MS, 12 * MS, 14 * MS], 14 * MS),
        Timing("b", 5 * MS, [35 * MS, 39 * MS, 43 * MS], 43 * MS),
        Timing("c", 0, [20 * MS], 20 * MS),
    )
    table = summarize(Run(timings, wall_ns=50 * MS))
    assert table["tokens"] == 7
    assert table["throughput_tok_s"] == pytest.approx(140)
    assert table["samples_per_s"] == pytest.approx(60)
    assert table["latency_ms_p50"] == pytest.approx(20)
    assert table["ttft_ms_p50"] == pytest.approx(20)
    # Gaps of 2 and 4 ms; the request with a single token has none. No mean of two: see percentile.
    assert table["tpot_ms_p50"] == pytest.approx(4)


def test_single_tokens_have_no_time_per_output_token() -> None:
    table = summarize(Run((Timing("a", 0, [MS], MS),), wall_ns=MS))
    assert "tpot_ms_p50" not in table


def test_enough_samples_bring_no_warning_about_them() -> None:
    timings = tuple(Timing(str(i), 0, [MS], MS) for i in range(64))
    table = summarize(Run(timings, wall_ns=MS))
    assert not any("samples" in warning for warning in table["warnings"])


def test_percentiles_are_loadgens() -> None:
    """The value at place n x q of the sorted, counted from 0 (LoadGen's results.cc)."""
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, q) for q in (50, 90, 99)] == [51, 91, 100]
    assert percentile([3.0, 1.0, 2.0], 50) == 2
    assert percentile([3.0], 99) == 3
