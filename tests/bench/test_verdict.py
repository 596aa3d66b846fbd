"""What is read from LoadGen's detailed log, and when two timers disagree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_rt.bench import verdict
from edge_rt.bench.timer import Run, Timing
from edge_rt.errors import EngineError

MS = 1_000_000

# 64 requests of 3 tokens, one after another: 10 ms to the first token, 5 ms for each of the others.
RUN = Run(
    tuple(
        Timing(str(i), at, [at + 10 * MS, at + 15 * MS, at + 20 * MS], at + 20 * MS)
        for i, at in enumerate(range(0, 64 * 25 * MS, 25 * MS))
    ),
    wall_ns=63 * 25 * MS + 20 * MS,
)
AGREED: dict[str, Any] = {
    "loadgen_version": "6.0.17 @ d6147c7eb7",
    "generated_samples_per_query": 1,
    "result_validity": "VALID",
    "result_min_duration_met": True,
    "result_min_queries_met": True,
    "early_stopping_met": True,
    "result_query_count": 64,
    "result_50.00_percentile_latency_ns": 20 * MS,
    "result_90.00_percentile_latency_ns": 20 * MS + MS // 2,
    "result_99.00_percentile_latency_ns": 20 * MS,
    "result_first_token_50.00_percentile_latency_ns": 10 * MS,
    "result_time_per_output_token_50.00_percentile_ns": 5 * MS,
    "result_qps_with_loadgen_overhead": 40.0,
}


def write(directory: Path, values: dict[str, Any], *more: str) -> verdict.Verdict:
    lines = [
        ":::MLLOG " + json.dumps({"key": key, "value": value, "metadata": {"is_error": False}})
        for key, value in values.items()
    ]
    (directory / verdict.DETAIL).write_text("\n".join([*lines, *more]) + "\n", encoding="utf-8")
    return verdict.read(directory)


def test_a_valid_run_on_which_both_agree(tmp_path: Path) -> None:
    said = write(tmp_path, AGREED, "a line of something else", ":::MLLOG {not JSON")
    assert (said.version, said.valid, said.samples) == ("6.0.17", True, 64)
    assert said.warnings() == []
    assert verdict.disagreements(said, RUN) == []


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("result_query_count", 63, "LoadGen counts 63 samples, our timer 64"),
        ("result_50.00_percentile_latency_ns", 22 * MS, "latency p50 in ms: LoadGen says 22, our"),
        ("result_99.00_percentile_latency_ns", 18 * MS, "latency p99"),
        ("result_first_token_50.00_percentile_latency_ns", 0, "first token p50"),
        ("result_time_per_output_token_50.00_percentile_ns", 10 * MS, "time per token p50"),
        ("result_qps_with_loadgen_overhead", 41.0, "queries/s: LoadGen says 41, our timer 40"),
        ("result_samples_per_second", 20.0, "samples/s"),
        ("result_tokens_per_second", 60.0, "tokens/s"),
    ],
)
def test_a_disagreement_is_named(key: str, value: float, named: str, tmp_path: Path) -> None:
    (found,) = verdict.disagreements(write(tmp_path, AGREED | {key: value}), RUN)
    assert found.startswith(named)


def test_offline_rates_agree(tmp_path: Path) -> None:
    at_once = Run(
        tuple(Timing(t.request_id, 0, t.token_ns, t.ended_ns) for t in RUN.timings), 10**9
    )
    said = write(
        tmp_path,
        {
            "result_validity": "VALID",
            "generated_samples_per_query": 64,
            "result_query_count": 1,
            "result_samples_per_second": 64.5,
            "result_tokens_per_second": 191.0,
        },
    )
    assert verdict.disagreements(said, at_once) == []


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {
                "result_min_duration_met": False,
                "effective_min_duration_ms": 10_000,
                "result_invalid_reason": "Increase expected QPS so the loadgen does more. ",
            },
            "it took less than 10 s. Increase expected QPS so the loadgen does more.",
        ),
        ({"result_min_queries_met": False}, "fewer queries were issued than it asks for"),
        (
            {
                "early_stopping_met": False,
                "early_stopping_ttft_result": "",
                "early_stopping_tpot_result": " * Only processed 10 queries.  * Need to process "
                "at least 64 queries for early stopping.",
            },
            "Only processed 10 queries. Need to process at least 64 queries for early stopping.",
        ),
    ],
)
def test_why_a_run_is_invalid(values: dict[str, Any], reason: str, tmp_path: Path) -> None:
    said = write(tmp_path, AGREED | {"result_validity": "INVALID"} | values)
    assert not said.valid
    assert said.reasons == (reason,)
    assert said.warnings() == [f"LoadGen says INVALID: {reason}"]


def test_invalid_for_a_reason_that_is_not_known(tmp_path: Path) -> None:
    said = write(tmp_path, AGREED | {"result_validity": "INVALID"})
    (warning,) = said.warnings()
    assert "its files say why" in warning


def test_loadgens_errors_are_passed_on(tmp_path: Path) -> None:
    error = {"key": "error_runtime", "value": "CAS failed.", "metadata": {"is_error": True}}
    said = write(tmp_path, AGREED, ":::MLLOG " + json.dumps(error))
    assert said.warnings() == ["LoadGen reports an error: CAS failed."]


def test_a_log_without_a_result(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="holds no result of LoadGen"):
        write(tmp_path, {"loadgen_version": "6.0.17"})
