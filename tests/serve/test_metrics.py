"""GET /metrics of a daemon that has served."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fakes.server import serve
from prometheus_client.parser import text_string_to_metric_families

from edge_rt.core import Limits
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner
from edge_rt.serve.settings import ServerSettings, Settings
from edge_rt.serve.state import State
from edge_rt.tokenizer import Tokenizer

LIMITS = Limits(2, 4, 64, 16, 4, 64, 64, 3072)


async def scrape(client: httpx.AsyncClient) -> dict[str, float]:
    page = await client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=")
    return {
        ":".join([sample.name, *(v for k, v in sample.labels.items() if k != "model_name")]): (
            sample.value
        )
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }


def test_what_was_served_is_counted(demo_checkpoint: Path) -> None:
    async def use(client: httpx.AsyncClient) -> None:
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
        for changes in ({}, {"stream": True}, {"n": 2}, {"max_tokens": -1}, {"prompt": [9999]}):
            await client.post("/v1/completions", json=body | changes)
        await client.post("/v1/completions", json=body | {"prompt": [[1]] * 5})
        found = await scrape(client)
        assert found["edge_rt_http_requests_total:200"] == 3
        assert found["edge_rt_http_requests_total:400"] == 2
        assert found["edge_rt_http_requests_total:422"] == 1
        assert found["edge_rt_prompt_tokens_total"] == 9
        assert found["edge_rt_generation_tokens_total"] == 20
        assert found["edge_rt_sequences_finished_total:length"] == 4
        assert found["edge_rt_time_to_first_token_seconds_count"] == 3
        assert found["edge_rt_request_queue_time_seconds_count"] == 3
        assert found["edge_rt_request_time_per_output_token_seconds_count"] == 4
        assert found["edge_rt_num_requests_running"] == 0
        assert found["edge_rt_kv_cache_usage_perc"] == 0
        assert found["edge_rt_status:ready"] == 1

    state = State(Settings(ServerSettings(max_queue=4)), model="demo")
    serve(NullRunner(LIMITS, NullOptions()), Tokenizer.load(demo_checkpoint), use, state)


@pytest.mark.parametrize("status", ["loading", "failed"])
def test_there_are_metrics_without_an_engine(demo_checkpoint: Path, status: str) -> None:
    state = State()

    async def use(client: httpx.AsyncClient) -> None:
        state.status, front, state.front = status, state.front, None  # type: ignore[assignment]
        found = await scrape(client)
        assert found[f"edge_rt_status:{status}"] == 1
        assert "edge_rt_num_requests_running" not in found
        state.front = front

    serve(NullRunner(LIMITS, NullOptions()), Tokenizer.load(demo_checkpoint), use, state)
