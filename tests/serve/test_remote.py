"""Commands, on the null engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.server import serve

from edge_rt.core import BoardInfo, BoardReading, Limits
from edge_rt.errors import ConfigError, EngineError, RequestError
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner
from edge_rt.serve.remote import Remote
from edge_rt.serve.state import State
from edge_rt.tokenizer import Tokenizer

LIMITS = Limits(8, 8, 512, 128, 8, 1024, 1024, 3072)


def ask(
    tokenizer: Tokenizer,
    verb: str,
    payload: Mapping[str, Any],
    state: State | None = None,
    others: bool = False,
) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """The answer of a serving daemon, and what it published."""
    state = state or State()
    published: list[Mapping[str, Any]] = []
    answers: list[Mapping[str, Any]] = []
    remote = Remote(state, lambda: None, published.append)

    async def use(client: httpx.AsyncClient) -> None:
        asking = asyncio.ensure_future(asyncio.to_thread(remote, verb, payload))
        while others and not asking.done():
            found = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert found.status_code == 200
        answers.append(await asking)

    serve(NullRunner(LIMITS, NullOptions(step_ms=1)), tokenizer, use, state)
    return answers[0], published


@pytest.fixture
def tokenizer(demo_checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(demo_checkpoint)


@pytest.mark.parametrize("scenario", ["single-stream", "offline"])
def test_bench(tokenizer: Tokenizer, scenario: str) -> None:
    payload = {"scenario": scenario, "samples": 3, "prompt_tokens": 5, "max_tokens": 7}
    answer, published = ask(tokenizer, "bench", payload)
    assert published == [answer]
    assert answer.items() >= payload.items()
    assert answer["tokens"] == 21
    assert answer["model"] == "model"
    steps = 21 if scenario == "single-stream" else 7
    assert answer["duration_s"] >= steps * 1e-3
    assert answer["latency_ms_p50"] >= 7
    assert not [one for one in answer["warnings"] if "other requests" in one]
    assert "energy_j_per_tok" not in answer


def test_bench_beside_others_says_so(tokenizer: Tokenizer) -> None:
    payload = {"samples": 20, "prompt_tokens": 5, "max_tokens": 20}
    answer, _ = ask(tokenizer, "bench", payload, others=True)
    assert [
        one for one in answer["warnings"] if one.endswith("other requests ended during the run")
    ]


def test_bench_with_a_meter(tokenizer: Tokenizer) -> None:
    """A machine that takes 10 W."""
    state = State()

    def board() -> tuple[BoardInfo, BoardReading]:
        now_s = time.monotonic()
        return BoardInfo("jetson"), BoardReading(0, energy_j=10 * now_s, metered_s=now_s)

    state.board = board
    answer, _ = ask(tokenizer, "bench", {"samples": 2, "max_tokens": 9}, state)
    expected_j = 10 * answer["duration_s"] / 18
    assert abs(answer["energy_j_per_tok"] / expected_j - 1) < 1e-6


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"sample": 3}, "did you mean 'samples'"),
        ({"samples": 0}, "samples must be 1 to 1000"),
        ({"samples": "3"}, "expected int"),
        ({"scenario": "server"}, "is not one of"),
    ],
)
def test_bench_refuses(tokenizer: Tokenizer, payload: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(tokenizer, "bench", payload)


@pytest.mark.parametrize("payload", [{"max_tokens": 1020}, {"prompt_tokens": 10_000_000}])
def test_bench_of_what_does_not_fit(tokenizer: Tokenizer, payload: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="1024"):
        ask(tokenizer, "bench", payload)


def test_bench_of_a_daemon_that_is_not_ready() -> None:
    with pytest.raises(RequestError, match="loading"):
        Remote(State(), lambda: None, lambda _: None)("bench", {})


def test_drain() -> None:
    stopped: list[bool] = []
    remote = Remote(State(), lambda: stopped.append(True), lambda _: None)
    with pytest.raises(ConfigError, match="takes no settings, found now"):
        remote("drain", {"now": True})
    assert not stopped
    assert remote("drain", {}) == {"drain_s": 30.0}
    assert stopped == [True]


def test_there_is_no_power_cap_yet() -> None:
    with pytest.raises(EngineError, match="no power governor"):
        Remote(State(), lambda: None, lambda _: None)("power-cap", {"power_mw": 30_000})
