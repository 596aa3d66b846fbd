"""What LoadGen says of a run, in its detailed log, and whether it agrees with our timestamps.

LoadGen takes its own time at every issue, first token and end; ours are taken just inside of its
calls, by another clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_rt.bench import report
from edge_rt.bench.timer import Run
from edge_rt.errors import EngineError
from edge_rt.telemetry.percentile import percentile

DETAIL = "mlperf_log_detail.txt"

PERCENTILES = (50, 90, 99)
TOLERANCE = 0.02  # of LoadGen's value
TOLERANCE_MS = 1.0  # or that much, whichever is more

_LINE = ":::MLLOG "
_MORE = re.compile("Need to process|Would need to run")  # queries


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reasons` are empty for a valid run; `values` are all that LoadGen logs, by its keys."""

    version: str
    valid: bool
    reasons: tuple[str, ...]
    errors: tuple[str, ...]
    values: Mapping[str, Any]

    @property
    def samples(self) -> int:
        """How many were issued and answered."""
        queries: int = self.values["result_query_count"]
        per_query: int = self.values["generated_samples_per_query"]
        return queries * per_query

    def table(self, logs: Path) -> dict[str, Any]:
        """For reports; `logs` is where LoadGen's files are."""
        return {
            "version": self.version,
            "valid": self.valid,
            "reasons": list(self.reasons),
            "expected_qps": self.values.get("effective_target_qps"),
            "logs": str(logs),
        }

    def warnings(self) -> list[str]:
        """Why LoadGen would not let the result stand."""
        return [f"LoadGen says INVALID: {reason}" for reason in self.reasons] + [
            f"LoadGen reports an error: {error}" for error in self.errors
        ]


def read(logs: Path) -> Verdict:
    """The verdict in LoadGen's files; EngineError if there is none."""
    values: dict[str, Any] = {}
    errors = []
    for entry in _entries(logs / DETAIL):
        if entry.get("metadata", {}).get("is_error"):
            errors.append(str(entry["value"]))
        else:
            values[entry["key"]] = entry["value"]
    validity = values.get("result_validity")
    if validity not in {"VALID", "INVALID"}:
        raise EngineError(f"{logs / DETAIL} holds no result of LoadGen; it did not come to its end")
    valid = validity == "VALID"
    version = str(values.get("loadgen_version", "unknown")).split(" ")[0]
    reasons = () if valid else tuple(_reasons(values)) or ("its files say why",)
    return Verdict(version, valid, reasons, tuple(errors), values)


def _entries(detail: Path) -> Iterator[dict[str, Any]]:
    for line in detail.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(_LINE):
            try:
                yield json.loads(line.removeprefix(_LINE))
            except ValueError:  # LoadGen does not escape all that it quotes; results are numbers
                continue


def _reasons(values: Mapping[str, Any]) -> Iterator[str]:
    if not values.get("result_min_duration_met", True):
        least_s = values.get("effective_min_duration_ms", 0) / 1e3
        yield f"it took less than {least_s:g} s. {values.get('result_invalid_reason', '')}".strip()
    if not values.get("result_min_queries_met", True):
        yield "fewer queries were issued than it asks for"
    if not values.get("result_perf_constraints_met", True):
        yield "too many queries took longer than the limits"
    if not values.get("early_stopping_met", True):
        found = [str(text) for key, text in values.items() if key.startswith("early_stopping_")]
        yield from {_sentences(text) for text in found if _MORE.search(text)}


def _sentences(text: str) -> str:
    """LoadGen's list of points as a line."""
    return " ".join(re.sub(r"(^|\s)\*\s", " ", text).split())


def disagreements(verdict: Verdict, run: Run) -> list[str]:
    """Where LoadGen's figures and ours differ by more than the tolerance; none, if all is well."""
    found = []
    if verdict.samples != len(run.timings):
        found.append(f"LoadGen counts {verdict.samples} samples, our timer {len(run.timings)}")
    times_ms, rates = _times_ms(run), _rates(run)
    wall_ms = run.wall_ns * 1e-6
    for name, key, ours in times_ms + rates:
        if key not in verdict.values:
            continue
        theirs = verdict.values[key] * (1e-6 if key.endswith("_ns") else 1.0)
        least = TOLERANCE_MS * (1.0 if key.endswith("_ns") else theirs / wall_ms)
        if abs(theirs - ours) > max(TOLERANCE * theirs, least):
            found.append(
                f"{name}: LoadGen says {theirs:.6g}, our timer {ours:.6g}: more than "
                f"{100 * TOLERANCE:g} % and {TOLERANCE_MS:g} ms apart"
            )
    return found


def _times_ms(run: Run) -> list[tuple[str, str, float]]:
    """Name, LoadGen's key and our value of each time that both have measured."""
    times = {
        ("latency", "result_{}_percentile_latency_ns"): report.latency_ms(run),
        ("first token", "result_first_token_{}_percentile_latency_ns"): report.ttft_ms(run),
        ("time per token", "result_time_per_output_token_{}_percentile_ns"): report.tpot_ms(run),
    }
    return [
        (f"{what} p{q} in ms", key.format(f"{q}.00"), percentile(values, q))
        for (what, key), values in times.items()
        for q in PERCENTILES
        if values
    ]


def _rates(run: Run) -> list[tuple[str, str, float]]:
    """As _times_ms, of what both have counted per second."""
    timings, wall_s = run.timings, run.wall_ns * 1e-9
    rates = [
        ("samples/s", "result_samples_per_second", len(timings) / wall_s),
        (
            "tokens/s",
            "result_tokens_per_second",
            sum(len(t.token_ns) for t in timings) / wall_s,
        ),
    ]
    rates += [  # the server scenario's
        ("completed samples/s", "result_completed_samples_per_sec", (len(timings) - 1) / wall_s),
        ("completed tokens/s", "result_completed_tokens_per_second", rates[1][2]),
    ]
    issuing_s = (timings[-1].submitted_ns - timings[0].submitted_ns) * 1e-9
    if issuing_s > 0:  # one query or more at a time; LoadGen counts from the first to the last
        per_s = (len(timings) - 1) / issuing_s
        rates += [
            ("queries/s", "result_qps_with_loadgen_overhead", per_s),
            ("scheduled samples/s", "result_scheduled_samples_per_sec", per_s),
        ]
    return rates
