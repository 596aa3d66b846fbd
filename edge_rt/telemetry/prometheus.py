"""The metrics as Prometheus reads them: GET /metrics.

Names are vLLM's with `edge_rt_` for `vllm:`, which Prometheus keeps for recording rules, wherever
a number means what vLLM's does. OpenTelemetry's names for a server of generative AI stand beside
them, over the same histograms.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import edge_rt
from edge_rt.telemetry.board_families import board_families
from edge_rt.telemetry.histogram import Histogram
from edge_rt.telemetry.link_families import link_families
from edge_rt.telemetry.sources import Sources


class Exposition(Collector):
    """Pages of one daemon's metrics."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._metrics, self._model = sources.metrics, sources.model
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._registry.register(self)

    def page(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, in the format that an Accept header asks for."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """One family after another."""
        info = InfoMetricFamily("edge_rt_build", "The running version.")
        info.add_metric([], {"version": edge_rt.__version__})
        yield info
        status = GaugeMetricFamily(
            "edge_rt_status", "1 for what the daemon is doing.", labels=["status"]
        )
        is_now = self._sources.status()
        for one in self._sources.statuses:
            status.add_metric([one], float(is_now == one))
        yield status
        yield from self._of_the_engine()
        yield from self._counters()
        yield from self._histograms()
        yield from self._open_telemetry()
        board = self._sources.board()
        if board is not None:
            yield from board_families(*board, time.monotonic_ns())
        yield from link_families(self._sources.link())

    def _of_the_engine(self) -> Iterator[Metric]:
        found = self._sources.engine()
        if found is None:
            return
        limits, load = found
        yield self._gauge("num_requests_running", "Requests in the engine.", load.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for the engine.", load.queued)
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of the cache's pages that are held: 1 is all.",
            load.pages_in_use / limits.pages,
        )
        yield self._counter(
            "num_preemptions", "Requests that gave up their pages.", {(): load.preemptions}
        )

    def _counters(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield self._counter("prompt_tokens", "Prompt tokens computed.", {(): metrics.prompt_tokens})
        yield self._counter("generation_tokens", "Tokens sampled.", {(): metrics.generation_tokens})
        yield self._counter(
            "engine_failed_steps", "Steps that the engine did not do.", {(): metrics.failed_steps}
        )
        yield self._counter(
            "sequences_finished",
            "Continuations that have ended.",
            {(reason,): count for reason, count in sorted(metrics.finished.items())},
            "finished_reason",
        )
        yield self._counter(
            "http_requests",
            "Completion requests answered; status 499: the client had gone.",
            {(str(status),): count for status, count in sorted(metrics.answered.items())},
            "status",
        )

    def _histograms(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, what, histogram in (
            (
                "request_queue_time_seconds",
                "From arrival to a place in the engine.",
                metrics.queue_s,
            ),
            ("time_to_first_token_seconds", "From arrival to the first token.", metrics.ttft_s),
            (
                "request_time_per_output_token_seconds",
                "Mean time between a continuation's tokens.",
                metrics.tpot_s,
            ),
            (
                "e2e_request_latency_seconds",
                "From a request's arrival to its end.",
                metrics.latency_s,
            ),
            ("request_prompt_tokens", "Prompt tokens of a request.", metrics.request_prompt_tokens),
            (
                "request_generation_tokens",
                "Tokens of a continuation.",
                metrics.request_generation_tokens,
            ),
            ("iteration_tokens", "Tokens computed in one step.", metrics.step_tokens),
            (
                "prefill_step_seconds",
                "The engine's time for the prompts of one step.",
                metrics.prefill_step_s,
            ),
            (
                "decode_step_seconds",
                "The engine's time for one token of each row.",
                metrics.decode_step_s,
            ),
        ):
            yield self._histogram(name, what, histogram)

    def _open_telemetry(self) -> Iterator[Metric]:
        labels = {
            "gen_ai_operation_name": "text_completion",
            "gen_ai_provider_name": "edge_rt",
            "gen_ai_request_model": self._model,
        }
        metrics = self._metrics
        for name, what, histogram in (
            ("request_duration", "From a request's arrival to its end.", metrics.latency_s),
            ("time_to_first_token", "From arrival to the first token.", metrics.ttft_s),
            ("time_per_output_token", "Time per token after the first.", metrics.tpot_s),
        ):
            family = HistogramMetricFamily(
                f"gen_ai_server_{name}_seconds", what, labels=list(labels)
            )
            family.add_metric(list(labels.values()), histogram.cumulative(), histogram.sum)
            yield family

    def _gauge(self, name: str, what: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"edge_rt_{name}", what, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(
        self, name: str, what: str, values: Mapping[tuple[str, ...], float], *labels: str
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(f"edge_rt_{name}", what, labels=["model_name", *labels])
        for of, value in values.items():
            family.add_metric([self._model, *of], value)
        return family

    def _histogram(self, name: str, what: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"edge_rt_{name}", what, labels=["model_name"])
        family.add_metric([self._model], histogram.cumulative(), histogram.sum)
        return family
