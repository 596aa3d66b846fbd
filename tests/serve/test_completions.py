"""The real openai client against a daemon; what it says is what `generate` says."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serve.conftest import Daemon

from edge_rt.cli.generate import generate
from edge_rt.core import SamplingParams
from edge_rt.tokenizer import Tokenizer

BundleFactory = Callable[[str], Path]
PROMPT = "def read_file(path"


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (one,) = client.models.list().data
    return one.id


@pytest.fixture(scope="module")
def expected(demo_bundle: BundleFactory) -> str:
    """What follows PROMPT, greedily."""
    (found,) = generate(demo_bundle("demo.cpu"), [PROMPT], SamplingParams(16))
    return found.choices.rows[0].text


@pytest.fixture(scope="module")
def complete(client: openai.OpenAI, model: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        given = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0} | arguments
        return client.completions.create(**given)

    return call


def test_a_completion(complete: Callable[..., Any], expected: str, model: str) -> None:
    answer = complete()
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (expected, "length", 0)
    assert (answer.object, answer.model) == ("text_completion", model)
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16


def test_a_stream_is_the_completion_in_pieces(complete: Callable[..., Any], expected: str) -> None:
    events = list(complete(stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events if event.choices) == expected
    assert [len(event.choices) for event in events] == [1] * 16 + [0]
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None] * 15 + ["length"]
    assert events[-1].usage.completion_tokens == 16
    assert all(event.usage is None for event in events[:-1])
    assert len({event.id for event in events}) == 1


def test_prompts_of_every_kind(
    complete: Callable[..., Any], expected: str, demo_bundle: BundleFactory
) -> None:
    ids = Tokenizer.load(demo_bundle("demo.cpu")).encode(PROMPT)
    for prompt in (ids, [PROMPT], [ids]):
        assert complete(prompt=prompt).choices[0].text == expected
    several = complete(prompt=[PROMPT, "import os", PROMPT], n=2, best_of=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3, 4, 5]
    texts = [choice.text for choice in several.choices]
    assert texts[:2] == texts[4:] == [expected] * 2
    assert texts[2] != expected


def test_echo_stop_and_seed(complete: Callable[..., Any], expected: str) -> None:
    assert complete(echo=True).choices[0].text == PROMPT + expected
    assert "".join(e.choices[0].text for e in complete(echo=True, stream=True)) == PROMPT + expected
    stop = expected[9:12]
    (choice,) = complete(stop=["never", stop]).choices
    assert (choice.text, choice.finish_reason) == (expected[: expected.index(stop)], "stop")
    first, second = (complete(temperature=1, seed=seed).choices[0].text for seed in (3, 3))
    assert first == second
    assert len({complete(temperature=1).choices[0].text for _ in range(4)}) > 1


def test_log_probabilities(complete: Callable[..., Any], expected: str) -> None:
    (choice,) = complete(logprobs=2).choices
    found = choice.logprobs
    assert "".join(found.tokens) == expected
    assert all(len(top) == 2 for top in found.top_logprobs)
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())  # greedy
    for offset, token in zip(found.text_offset, found.tokens, strict=True):
        assert expected[offset : offset + len(token)] == token
    streamed = [e.choices[0].logprobs for e in complete(logprobs=2, stream=True)]
    assert [t for one in streamed for t in one.tokens] == found.tokens
    assert [o for one in streamed for o in one.text_offset] == found.text_offset


def test_best_of(complete: Callable[..., Any]) -> None:
    found = complete(temperature=1, seed=1, n=1, best_of=4, logprobs=0)
    drawn = complete(temperature=1, seed=1, n=4, logprobs=0)

    def mean(choice: Any) -> float:
        logprobs: list[float] = choice.logprobs.token_logprobs
        return sum(logprobs) / len(logprobs)

    assert found.choices[0].text == max(drawn.choices, key=mean).text
    assert found.usage.completion_tokens == drawn.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": [5] * 600}, openai.BadRequestError, "600 tokens and max_tokens 16 are more"),
        ({"prompt": ""}, openai.BadRequestError, "the prompt is empty"),
        ({"prompt": []}, openai.BadRequestError, "prompt is an empty list"),
        ({"prompt": ["a", 1]}, openai.BadRequestError, "prompt must be text, a list of texts"),
        ({"prompt": [99999]}, openai.BadRequestError, "token id 99999 in the prompt"),
        (
            {"prompt": [2**70], "echo": True},
            openai.BadRequestError,
            "token id 1180591620717411303424",
        ),
        ({"max_tokens": 0}, openai.UnprocessableEntityError, r"\$.max_tokens"),
        ({"echo": True, "logprobs": 0}, openai.BadRequestError, "echo with logprobs"),
        ({"n": 100}, openai.BadRequestError, "a request may take 1 to 16 continuations"),
        ({"n": 2, "best_of": 1}, openai.BadRequestError, "best_of 1 is less than n 2"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix is not supported"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias maps token ids"),
        ({"logit_bias": {"1": 1, "01": 1}}, openai.BadRequestError, "logit_bias maps token ids"),
        ({"logit_bias": {"1_0": 1}}, openai.BadRequestError, "logit_bias maps token ids"),
        ({"prompt": "a" * 500_000}, openai.BadRequestError, "500000 characters is more than the"),
        ({"model": "gpt-9"}, openai.NotFoundError, "'gpt-9' is not served here"),
        ({"temperature": 3}, openai.UnprocessableEntityError, r"\$.temperature"),
        ({"extra_body": {"nonsense": 1}}, openai.UnprocessableEntityError, "nonsense"),
    ],
)
def test_refusals_come_before_any_stream(
    complete: Callable[..., Any],
    arguments: dict[str, Any],
    error: type[Exception],
    message: str,
    stream: bool,
) -> None:
    """vLLM #765, #1087: a prompt longer than the context hung; llm-d-inference-sim #596: the error
    came inside the stream.
    """
    with pytest.raises(error, match=message):
        complete(stream=stream, **arguments)


def test_a_stream_that_is_closed_is_cancelled(complete: Callable[..., Any], daemon: Daemon) -> None:
    def cancelled() -> float:
        page = httpx.get(f"{daemon.url}/metrics").text
        found = re.search(r'sequences_finished_total{.*"cancelled".*} (.*)', page)
        assert found is not None
        return float(found[1])

    before = cancelled()
    rest = {"extra_body": {"ignore_eos": True}}
    with complete(max_tokens=480, stream=True, **rest) as stream:
        assert next(iter(stream)).choices[0].finish_reason is None
    deadline = time.monotonic() + 20
    while cancelled() == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_no_other_origin_may_ask(daemon: Daemon) -> None:
    headers = {"origin": "http://elsewhere", "access-control-request-method": "POST"}
    for answer in (
        httpx.options(f"{daemon.url}/v1/completions", headers=headers),
        httpx.post(f"{daemon.url}/v1/completions", headers=headers, json={"prompt": "x"}),
    ):
        assert not any(name.startswith("access-control") for name in answer.headers)


def test_bodies_that_are_no_requests(daemon: Daemon) -> None:
    def post(body: bytes) -> httpx.Response:
        return httpx.post(f"{daemon.url}/v1/completions", content=body)

    for body, status, message in (
        (b"", 400, "not valid JSON"),
        (b"{", 400, "not valid JSON"),
        (b"[]", 422, "Expected `object`"),
        (b"{}", 422, "missing required field `prompt`"),
        (b'{"prompt": "\xff"}', 400, "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "not valid JSON"),
        (b'{"prompt": "' + b"x" * (2 << 20) + b'"}', 413, "longer than"),
    ):
        answer = post(body)
        assert (answer.status_code, body[:20]) == (status, body[:20])
        assert message in answer.json()["error"]["message"]


def test_other_paths(daemon: Daemon) -> None:
    (model,) = httpx.get(f"{daemon.url}/v1/models").json()["data"]
    assert httpx.get(f"{daemon.url}/v1/models/{model['id']}").json() == model
    other = httpx.get(f"{daemon.url}/v1/models/gpt-9")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    assert httpx.post(f"{daemon.url}/v1/completions/", json={}).status_code == 404
    assert httpx.get(f"{daemon.url}/health").json() == {"status": "ready"}
    assert httpx.get(f"{daemon.url}/version").json()["version"]
    assert httpx.get(f"{daemon.url}/v1/nothing").json()["error"]["type"] == "not_found_error"
    chat = httpx.post(f"{daemon.url}/v1/chat/completions", json={})
    assert chat.status_code == 404
    assert "use /v1/completions" in chat.json()["error"]["message"]
    assert httpx.get(f"{daemon.url}/v1/completions").status_code == 405
