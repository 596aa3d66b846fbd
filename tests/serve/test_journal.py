"""One line for each request, with what it took and without what it said."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.server import serve

from edge_rt.core import Limits
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner
from edge_rt.serve.endpoint import CompletionsEndpoint
from edge_rt.serve.journal import JournalFormatter
from edge_rt.serve.settings import LogSettings, Settings
from edge_rt.serve.state import State
from edge_rt.tokenizer import Tokenizer

LIMITS = Limits(2, 2, 64, 16, 2, 64, 64, 3072)


def lines(
    caplog: pytest.LogCaptureFixture, tokenizer: Tokenizer, state: State, *bodies: Any
) -> list[dict[str, str]]:
    async def use(client: httpx.AsyncClient) -> None:
        for body in bodies:
            await client.post("/v1/completions", json=body)

    with caplog.at_level(logging.INFO, "edge_rt.request"):
        serve(NullRunner(LIMITS, NullOptions()), tokenizer, use, state)
    messages = [r.getMessage() for r in caplog.records if r.name == "edge_rt.request"]
    found = []
    for message in messages:
        parts, _, error = message.partition(" error=")
        line = dict(part.split("=", 1) for part in parts.split(" "))
        found.append(line | {"error": json.loads(error)} if error else line)
    return found


def test_a_line_a_request(caplog: pytest.LogCaptureFixture, demo_checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(demo_checkpoint)
    bodies = [
        {"prompt": "secret", "max_tokens": 5, "n": 2},
        {"prompt": "secret", "max_tokens": 3, "stream": True},
        {"prompt": "secret", "max_tokens": 10**6},
        {"prompt": 5},
    ]
    whole, stream, refused, malformed = lines(caplog, tokenizer, State(), *bodies)
    assert (whole["status"], whole["completion_tokens"], whole["finish"]) == ("200", "10", "length")
    assert (stream["stream"], stream["completion_tokens"]) == ("true", "3")
    assert 0 < float(stream["ttft_ms"]) <= float(stream["latency_ms"])
    assert (refused["status"], refused["completion_tokens"]) == ("400", "0")
    assert "1000000 are more than" in refused["error"]
    assert malformed["status"] == "422"
    assert malformed["error"].startswith("Expected `str | array`")
    assert whole["client"] == "127.0.0.1"
    assert not {"error", "cached"} & whole.keys()
    assert "secret" not in caplog.text


def test_text_only_where_it_is_asked_for(
    caplog: pytest.LogCaptureFixture, demo_checkpoint: Path
) -> None:
    state = State(Settings(log=LogSettings(prompts=True)))
    tokenizer = Tokenizer.load(demo_checkpoint)
    (line,) = lines(caplog, tokenizer, state, {"prompt": "secret", "max_tokens": 1})
    assert line["prompt"] == '"secret"'
    assert line["text"].startswith('["')


def test_lines_for_the_journal() -> None:
    record = logging.LogRecord("a", logging.ERROR, "f", 1, "one\ntwo", None, None)
    assert JournalFormatter("%(name)s: %(message)s").format(record) == "<3>a: one\n<3>two"


def test_a_client_that_leaves_in_its_body(
    demo_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    messages = iter(
        [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    )

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        pytest.fail(f"nobody is there to take {message}")

    async def use(_client: httpx.AsyncClient) -> None:
        scope = {"type": "http", "headers": [], "method": "POST", "path": "/v1/completions"}
        await CompletionsEndpoint(state)(scope, receive, send)

    state = State()
    with caplog.at_level(logging.INFO, "edge_rt.request"):
        serve(NullRunner(LIMITS, NullOptions()), Tokenizer.load(demo_checkpoint), use, state)
    assert "status=499" in caplog.text
