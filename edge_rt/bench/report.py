"""What a measurement means, in the keys of the command contract."""

from __future__ import annotations

from typing import Any

from edge_rt.bench.timer import Run
from edge_rt.telemetry.percentile import percentile

_MS = 1e-6
MIN_SAMPLES = 64  # MLPerf's least number of queries for a percentile


def summarize(run: Run) -> dict[str, Any]:
    """Latency, time to first token (ttft), time per output token (tpot) and throughput."""
    latency, ttft, tpot = latency_ms(run), ttft_ms(run), tpot_ms(run)
    tokens = sum(len(t.token_ns) for t in run.timings)
    wall_s = run.wall_ns * 1e-9
    table = {
        "samples": len(run.timings),
        "tokens": tokens,
        "duration_s": wall_s,
        "latency_ms_p50": percentile(latency, 50),
        "latency_ms_p90": percentile(latency, 90),
        "latency_ms_p99": percentile(latency, 99),
        "ttft_ms_p50": percentile(ttft, 50),
        "ttft_ms_p99": percentile(ttft, 99),
        "throughput_tok_s": tokens / wall_s,
        "samples_per_s": len(run.timings) / wall_s,
        "warnings": few_samples(len(run.timings)),
    }
    if tpot:
        table["tpot_ms_p50"] = percentile(tpot, 50)
    return table


def latency_ms(run: Run) -> list[float]:
    """From the hand-in of each request to its end."""
    return [(t.ended_ns - t.submitted_ns) * _MS for t in run.timings]


def ttft_ms(run: Run) -> list[float]:
    """From the hand-in of each request to its first token."""
    return [(t.token_ns[0] - t.submitted_ns) * _MS for t in run.timings]


def tpot_ms(run: Run) -> list[float]:
    """Mean time between the tokens of each request that has more than one."""
    return [
        (t.token_ns[-1] - t.token_ns[0]) * _MS / (len(t.token_ns) - 1)
        for t in run.timings
        if len(t.token_ns) > 1
    ]


def few_samples(samples: int) -> list[str]:
    """A warning if percentiles of so few mean little."""
    if samples >= MIN_SAMPLES:
        return []
    return [f"{samples} samples: percentiles need at least {MIN_SAMPLES} to mean much"]
