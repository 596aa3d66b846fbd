"""The page as promtool's linter sees it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fakes.pages import LIMITS, ORIN, link, reading, states
from fakes.promtool import promtool
from fakes.server import serve

from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner
from edge_rt.serve.settings import Settings
from edge_rt.serve.state import State
from edge_rt.telemetry.prometheus import Exposition
from edge_rt.telemetry.sources import Sources
from edge_rt.tokenizer import Tokenizer


@pytest.mark.parametrize("sources", [pytest.param(found, id=name) for name, found in states()])
def test_promtool_finds_nothing(sources: Sources) -> None:
    promtool("check", "metrics", page=Exposition(sources).page("")[0])


def test_promtool_finds_nothing_in_what_a_daemon_answers(demo_checkpoint: Path) -> None:
    state = State(Settings(), model="demo", board=lambda: (ORIN, reading()), link=link)

    async def use(client: httpx.AsyncClient) -> None:
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        page = await client.get("/metrics")
        assert (
            b'\nedge_rt_http_requests_total{model_name="demo",status="200"} 1.0\n' in page.content
        )
        assert b"\nedge_rt_board_power_watts 12.5\n" in page.content
        promtool("check", "metrics", page=page.content)
        state.status, front, state.front = "failed", state.front, None
        promtool("check", "metrics", page=(await client.get("/metrics")).content)
        state.front = front

    serve(NullRunner(LIMITS, NullOptions()), Tokenizer.load(demo_checkpoint), use, state)


def test_promtool_would_find_something() -> None:
    bad = b"# HELP x_milliseconds X.\n# TYPE x_milliseconds gauge\nx_milliseconds 1\n"
    with pytest.raises(AssertionError, match="use base unit"):
        promtool("check", "metrics", page=Exposition(next(states())[1]).page("")[0] + bad)
