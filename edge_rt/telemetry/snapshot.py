"""The daemon's figures as flat JSON: docs/telemetry.md says what each one means."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_rt.core import BoardReading
from edge_rt.telemetry.metered import Metered
from edge_rt.telemetry.metrics import Metrics
from edge_rt.telemetry.percentile import percentile
from edge_rt.telemetry.sources import Sources

Fields = dict[str, Any]

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class _Counts:
    """What rates are differences of."""

    taken_ns: int
    prompt_tokens: int = 0
    generation_tokens: int = 0
    requests: int = 0
    decode_rows: int = 0
    decode_steps: int = 0
    busy_s: float = 0.0
    metered: Metered | None = None


class Snapshots:
    """Takes one snapshot after another; rates and percentiles are of the time between two.

    What is not known is not there: a rate before there is an engine, a percentile of no request, a
    sensor that does not answer.
    """

    def __init__(self, sources: Sources, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._sources, self._clock_ns = sources, clock_ns
        self._started_ns = clock_ns()
        self._before = self._counts(None)

    def take(self) -> Fields:
        """All figures now."""
        sources, before = self._sources, self._before
        board = sources.board()
        reading = None if board is None else board[1]
        now = self._before = self._counts(reading)
        interval_s = (now.taken_ns - before.taken_ns) * 1e-9
        fields: Fields = {
            "status": sources.status(),
            "uptime_s": round((now.taken_ns - self._started_ns) * 1e-9, 3),
            "interval_s": round(interval_s, 3),
        }
        fields |= _totals(sources.metrics)
        fields |= self._of_the_engine(before, now, interval_s)
        fields |= _times(sources.metrics)
        if reading is not None:
            fields |= dict(_of_the_board(reading))
            fields |= _energy(before, now, interval_s)
        link = sources.link()
        fields |= {
            "spool_records": link.spool_records,
            "spool_bytes": link.spool_bytes,
            "dropped_records_total": link.dropped_records,
            "refused_records_total": link.refused_records,
            "mqtt_reconnects_total": link.reconnects,
        }
        resident_bytes = _resident_bytes()
        if resident_bytes is not None:
            fields["memory_process_bytes"] = resident_bytes
        return fields

    def _counts(self, reading: BoardReading | None) -> _Counts:
        metrics = self._sources.metrics
        return _Counts(
            taken_ns=self._clock_ns(),
            prompt_tokens=metrics.prompt_tokens,
            generation_tokens=metrics.generation_tokens,
            requests=metrics.latency_s.count,
            decode_rows=metrics.decode_rows,
            decode_steps=metrics.decode_step_s.count,
            busy_s=metrics.prefill_step_s.sum + metrics.decode_step_s.sum,
            metered=Metered.of(reading),
        )

    def _of_the_engine(self, before: _Counts, now: _Counts, interval_s: float) -> Fields:
        engine = self._sources.engine()
        if engine is None:
            return {}
        limits, load = engine
        fields: Fields = {
            "requests_running": load.running,
            "requests_waiting": load.queued,
            "preemptions_total": load.preemptions,
            "kv_cache_usage": round(load.pages_in_use / limits.pages, 4),
        }
        if interval_s > 0:
            fields |= {
                "prompt_tok_s": _rate(now.prompt_tokens - before.prompt_tokens, interval_s),
                "generation_tok_s": _rate(
                    now.generation_tokens - before.generation_tokens, interval_s
                ),
                "requests_per_s": _rate(now.requests - before.requests, interval_s),
                "engine_busy": round(min(1.0, (now.busy_s - before.busy_s) / interval_s), 4),
            }
        steps = now.decode_steps - before.decode_steps
        if steps > 0:
            rows = (now.decode_rows - before.decode_rows) / steps
            fields |= {
                "decode_rows_mean": round(rows, 3),
                "batch_occupancy": round(rows / limits.max_rows, 4),
            }
        return fields


def _rate(count: int, interval_s: float) -> float:
    return round(count / interval_s, 3)


def _totals(metrics: Metrics) -> Fields:
    fields: Fields = {
        "requests_finished_total": metrics.latency_s.count,
        "prompt_tokens_total": metrics.prompt_tokens,
        "generation_tokens_total": metrics.generation_tokens,
        "engine_failed_steps_total": metrics.failed_steps,
        "cached_answers_total": metrics.cached_answers,
    }
    fields |= {f"sequences_{why}_total": count for why, count in list(metrics.finished.items())}
    fields |= {f"http_{status}_total": count for status, count in list(metrics.answered.items())}
    return fields


def _times(metrics: Metrics) -> Fields:
    """Percentiles over the requests that have ended since the last snapshot."""
    ended = metrics.take_ended()
    values = {
        "latency": [times.latency_s for times in ended],
        "ttft": [times.ttft_s for times in ended if times.ttft_s is not None],
        "tpot": [tpot_s for times in ended for tpot_s in times.tpot_s],
        "queue": [times.queue_s for times in ended if times.queue_s is not None],
    }
    return {
        f"{name}_ms_p{percent}": round(percentile(found, percent) * 1e3, 3)
        for name, found in values.items()
        if found
        for percent in PERCENTS
    }


def _of_the_board(reading: BoardReading) -> Iterator[tuple[str, float | int | str]]:
    if reading.power_mw is not None:
        yield "power_mw", round(reading.power_mw, 1)
    if reading.energy_j is not None:
        yield "energy_j_total", round(reading.energy_j, 3)
    for values, prefix, unit in (
        (reading.rails_mw, "rail", "mw"),
        (reading.temperatures_c, "temperature", "c"),
        (reading.clocks_hz, "clock", "hz"),
        (reading.fans_rpm, "fan", "rpm"),
    ):
        for name, value in values.items():
            yield f"{prefix}_{_part(name)}_{unit}", round(value, 3)
    for name, value in reading.loads.items():
        yield f"load_{_part(name)}", round(value, 4)
    for reason, count in reading.throttles.items():
        yield f"throttle_{_part(reason)}_total", count
    for name in ("memory_total_bytes", "memory_available_bytes", "power_mode"):
        found = getattr(reading, name)
        if found is not None:
            yield name, found
    if reading.lost:
        yield "lost", ",".join(sorted(reading.lost))


def _part(name: str) -> str:
    """Labels of rails and zones as part of a key."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _energy(before: _Counts, now: _Counts, interval_s: float) -> Fields:
    """Mean power, and energy per token."""
    if before.metered is None or now.metered is None:
        return {}
    metered, fields = now.metered.since(before.metered), Fields()
    if metered.power_mw is not None:
        fields["power_mw_mean"] = round(metered.power_mw, 1)
    tokens = now.generation_tokens - before.generation_tokens
    j_per_tok = metered.j_per_tok(interval_s, tokens)
    if j_per_tok is not None:
        fields["energy_j_per_tok"] = round(j_per_tok, 4)
    return fields


def _resident_bytes() -> int | None:
    try:
        pages = Path("/proc/self/statm").read_bytes().split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
