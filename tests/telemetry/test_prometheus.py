"""The page, read by Prometheus' own parsers."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from edge_rt.choice import Choice
from edge_rt.core import FinishReason, Limits, Load, Request, SampledToken, StepStats
from edge_rt.telemetry.metrics import Metrics
from edge_rt.telemetry.prometheus import Exposition
from edge_rt.telemetry.sources import Sources
from edge_rt.text import TextStream
from edge_rt.tokenizer import Tokenizer

LIMITS = Limits(8, 32, 512, 128, 16, 64, 1024, 3072)
MS, SECOND = 1_000_000, 1_000_000_000


def samples(page: Exposition) -> dict[tuple[str, str], float]:
    """By name and by the label that is neither the model nor a bound."""
    text, content_type = page.page("")
    assert content_type.startswith("text/plain")
    found = {}
    for family in parser.text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            assert sample.labels.get("model_name", "demo") == "demo"
            found[sample.name, ",".join(labels.values())] = sample.value
    return found


def exposition(metrics: Metrics, engine: tuple[Limits, Load] | None = None) -> Exposition:
    return Exposition(
        Sources(metrics, "demo", ("ready", "draining"), lambda: "ready", lambda: engine)
    )


def choice(tokenizer: Tokenizer, times_ns: list[int], finish: FinishReason) -> Choice:
    """A row whose tokens came at these times."""
    first, last = (times_ns[0], times_ns[-1]) if times_ns else (None, None)
    return Choice(
        row=0,
        stream=TextStream(tokenizer),
        tokens=[SampledToken(1) for _ in times_ns],
        finish=finish,
        first_token_ns=first,
        last_token_ns=last,
        ended_ns=(last or 0) + MS,
    )


def test_steps() -> None:
    metrics = Metrics()
    metrics.on_step(StepStats(0, 100, 2, 30 * MS, 4 * MS, sampled_tokens=3))
    metrics.on_step(StepStats(0, 0, 3, 0, 5 * MS, sampled_tokens=3))
    metrics.on_step(StepStats(0, 0, 0, 0, 0, sampled_tokens=0, failed=True))
    found = samples(exposition(metrics))
    assert found["edge_rt_prompt_tokens_total", ""] == 100
    assert found["edge_rt_generation_tokens_total", ""] == 6
    assert found["edge_rt_engine_failed_steps_total", ""] == 1
    assert found["edge_rt_iteration_tokens_count", ""] == 2
    assert found["edge_rt_iteration_tokens_sum", ""] == 105
    assert found["edge_rt_iteration_tokens_bucket", "4.0"] == 1
    assert found["edge_rt_prefill_step_seconds_count", ""] == 1
    assert abs(found["edge_rt_prefill_step_seconds_sum", ""] - 0.03) < 1e-12
    assert abs(found["edge_rt_decode_step_seconds_sum", ""] - 0.009) < 1e-12


def test_requests(demo_checkpoint: Path) -> None:
    metrics, tokenizer = Metrics(), Tokenizer.load(demo_checkpoint)
    request = Request("r", (1, 2, 3), rows=2)
    long = choice(tokenizer, [2 * SECOND, 3 * SECOND, 4 * SECOND], FinishReason.LENGTH)
    short = choice(tokenizer, [5 * SECOND // 2], FinishReason.STOP)
    metrics.on_end(request, [long, short], 1 * SECOND, 5 * SECOND // 4)
    late = choice(tokenizer, [], FinishReason.TIMEOUT)
    metrics.on_end(Request("q", (1,)), [late], -2 * SECOND, None)  # never had a place
    metrics.answered[200] += 1
    metrics.answered[429] += 2
    found = samples(exposition(metrics))
    assert found["edge_rt_request_queue_time_seconds_count", ""] == 1
    assert found["edge_rt_request_queue_time_seconds_sum", ""] == 0.25
    assert found["edge_rt_time_to_first_token_seconds_count", ""] == 1
    assert found["edge_rt_time_to_first_token_seconds_sum", ""] == 1
    assert found["edge_rt_request_time_per_output_token_seconds_count", ""] == 1
    assert found["edge_rt_request_time_per_output_token_seconds_sum", ""] == 1
    assert found["edge_rt_e2e_request_latency_seconds_count", ""] == 2
    assert abs(found["edge_rt_e2e_request_latency_seconds_sum", ""] - (3.001 + 2.001)) < 1e-9
    assert found["edge_rt_request_prompt_tokens_sum", ""] == 4
    assert found["edge_rt_request_generation_tokens_sum", ""] == 4
    ends = {reason: found["edge_rt_sequences_finished_total", reason] for reason in FinishReason}
    assert ends == dict.fromkeys(FinishReason, 0) | {
        FinishReason.LENGTH: 1,
        FinishReason.STOP: 1,
        FinishReason.TIMEOUT: 1,
    }
    assert found["edge_rt_http_requests_total", "200"] == 1
    assert found["edge_rt_http_requests_total", "429"] == 2


def test_the_engine_is_there_once_it_is_loaded() -> None:
    assert "edge_rt_num_requests_running" not in {
        name for name, _ in samples(exposition(Metrics()))
    }
    found = samples(exposition(Metrics(), (LIMITS, Load(3, 8, 12, 5))))
    assert found["edge_rt_num_requests_waiting", ""] == 3
    assert found["edge_rt_num_requests_running", ""] == 8
    assert found["edge_rt_kv_cache_usage_perc", ""] == 0.75
    assert found["edge_rt_num_preemptions_total", ""] == 5
    assert found["edge_rt_status", "ready"] == 1
    assert found["edge_rt_status", "draining"] == 0
    assert found["process_resident_memory_bytes", ""] > 2**20


def test_openmetrics_for_who_asks_for_it() -> None:
    page = exposition(Metrics(), (LIMITS, Load(0, 0, 0, 0)))
    text, content_type = page.page("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    names = [family.name for family in text_string_to_metric_families(text.decode())]
    assert len(names) == len(set(names))
    assert "edge_rt_generation_tokens" in names
