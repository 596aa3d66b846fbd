"""Answers are kept only where they would be the same again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.server import serve

from edge_rt.core import Limits
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner
from edge_rt.serve.cache import ResponseCache
from edge_rt.serve.state import State
from edge_rt.tokenizer import Tokenizer

LIMITS = Limits(4, 4, 64, 16, 4, 64, 64, 3072)


class Counting(NullRunner):
    """Counts prompts."""

    prompts = 0

    def prefill(self, chunks: Any, **options: Any) -> Any:
        self.prompts += sum(bool(chunk.draws) for chunk in chunks)
        return super().prefill(chunks, **options)


@pytest.mark.parametrize(
    ("first", "second", "is_kept"),
    [
        ({}, {}, True),
        ({}, {"user": "someone else"}, True),
        ({}, {"max_tokens": 7}, False),
        ({}, {"prompt": [1, 3]}, False),
        ({}, {"echo": True}, False),
        ({}, {"logprobs": 0}, False),
        ({}, {"stop": "x"}, False),
        ({}, {"stream": True}, False),
        ({"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "seed": 5}, True),
        ({"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "seed": 6}, False),
        ({"temperature": 1.0}, {"temperature": 1.0}, False),
        ({"timeout_s": 0.02, "max_tokens": 60}, {"timeout_s": 9, "max_tokens": 60}, False),
    ],
    ids=str,
)
def test_the_same_request_again(
    demo_checkpoint: Path, first: dict[str, Any], second: dict[str, Any], is_kept: bool
) -> None:
    body = {"prompt": [1, 2], "max_tokens": 6, "temperature": 0}
    runner = Counting(LIMITS, NullOptions(step_ms=2.0))

    async def use(client: httpx.AsyncClient) -> None:
        answers = [await client.post("/v1/completions", json=body | b) for b in (first, second)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert runner.prompts == (1 if is_kept else 2)
        if is_kept:
            found = [answer.json() for answer in answers]
            assert found[0]["choices"] == found[1]["choices"]
            assert found[0]["usage"] == found[1]["usage"]
            assert found[0]["id"] != found[1]["id"]

    serve(runner, Tokenizer.load(demo_checkpoint), use, State(cache=ResponseCache(2)))


def test_the_longest_unused_leaves_first(demo_checkpoint: Path) -> None:
    runner = Counting(LIMITS, NullOptions())

    async def use(client: httpx.AsyncClient) -> None:
        for prompt in (1, 2, 1, 3, 1, 2):  # 3 puts 2 out, not 1
            body = {"prompt": [prompt], "max_tokens": 2, "temperature": 0}
            await client.post("/v1/completions", json=body)
        assert runner.prompts == 4

    serve(runner, Tokenizer.load(demo_checkpoint), use, State(cache=ResponseCache(2)))


def test_none_is_kept_unless_asked_for(demo_checkpoint: Path) -> None:
    runner = Counting(LIMITS, NullOptions())

    async def use(client: httpx.AsyncClient) -> None:
        for _ in range(2):
            body = {"prompt": [1], "max_tokens": 2, "temperature": 0}
            await client.post("/v1/completions", json=body)
        assert runner.prompts == 2

    serve(runner, Tokenizer.load(demo_checkpoint), use)
