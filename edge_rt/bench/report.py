"""What a measurement means, in the keys of the command contract."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from edge_rt.bench.timer import Run

_MS = 1e-6
MIN_SAMPLES = 64  # MLPerf's least number of queries for a percentile


def summarize(run: Run) -> dict[str, Any]:
    """Latency, time to first token (ttft), time per output token (tpot) and throughput."""
    latency = [(t.ended_ns - t.submitted_ns) * _MS for t in run.timings]
    ttft = [(t.token_ns[0] - t.submitted_ns) * _MS for t in run.timings]
    tpot = [
        (t.token_ns[-1] - t.token_ns[0]) * _MS / (len(t.token_ns) - 1)
        for t in run.timings
        if len(t.token_ns) > 1
    ]
    tokens = sum(len(t.token_ns) for t in run.timings)
    wall_s = run.wall_ns * 1e-9
    table = {
        "samples": len(run.timings),
        "tokens": tokens,
        "duration_s": wall_s,
        "latency_ms_p50": _percentile(latency, 50),
        "latency_ms_p90": _percentile(latency, 90),
        "latency_ms_p99": _percentile(latency, 99),
        "ttft_ms_p50": _percentile(ttft, 50),
        "ttft_ms_p99": _percentile(ttft, 99),
        "throughput_tok_s": tokens / wall_s,
        "samples_per_s": len(run.timings) / wall_s,
        "warnings": _warnings(run),
    }
    if tpot:
        table["tpot_ms_p50"] = _percentile(tpot, 50)
    return table


def _percentile(values: list[float], q: float) -> float:
    return float(np.percentile(values, q))


def _warnings(run: Run) -> list[str]:
    found = []
    if len(run.timings) < MIN_SAMPLES:
        found.append(
            f"{len(run.timings)} samples: percentiles need at least {MIN_SAMPLES} to mean much"
        )
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        found.append(f"the load average is {load:.1f} on {cores} cores: something else is running")
    return found
