"""What can never be served is refused, and the refusal says what would be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from fakes.traffic import PAGED, execute, request, strict

from edge_rt.core import Batch, Request, SamplingParams
from edge_rt.errors import RequestError
from edge_rt.sched.scheduler import Scheduler


def sampled(**changes: Any) -> Request:
    return Request("a", (1,), replace(SamplingParams(2), **changes))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (request("a", prompt=0), "the prompt is empty"),
        (request("a", max_tokens=0), "max_tokens must be a whole number, 1 or more, found 0"),
        (
            request("a", prompt=30, max_tokens=5),
            "32 tokens .*: max_tokens 2 with this prompt or a prompt of 27 tokens with this max_to",
        ),
        (request("a", prompt=40), "what fits: a prompt of 30 tokens with this max_tokens"),
        (request("a", prompt=40, max_tokens=40), "what fits: a prompt of 31 tokens with max_"),
        (
            request("a", prompt=10, max_tokens=5, rows=3),
            "12 tokens of each of 3 continuations; what fits: max_tokens 2 with this prompt",
        ),
        (
            Request("a", (0, 11), SamplingParams(2)),
            "token id 11 in the prompt is not in the vocabulary, 0 to 10",
        ),
        (Request("a", (-1,), SamplingParams(2)), "token id -1"),
        (request("a", rows=0), "1 to 4 continuations, found 0"),
        (request("a", rows=5), "1 to 4 continuations, found 5"),
        (request("a", priority=2), "priority 2 is none of"),
        (request("taken"), "request id 'taken' is in use"),
        (sampled(temperature=-0.1), r"temperature must be a number, 0 to 100, found -0\.1"),
        (sampled(temperature=math.nan), "temperature must be a number"),
        (sampled(temperature="hot"), "temperature must be a number"),
        (sampled(top_p=0.0), "top_p must be more than 0; take temperature 0"),
        (sampled(top_p=1.1), "top_p must be a number, 0 to 1, found 1.1"),
        (sampled(top_k=-1), "top_k must be a whole number, 0 or more, found -1"),
        (sampled(top_k=1.5), "top_k must be a whole number"),
        (sampled(min_p=2), "min_p must be a number, 0 to 1"),
        (sampled(repetition_penalty=0), "repetition_penalty must be a number, 0.01 to 100"),
        (sampled(min_tokens=3), "min_tokens 3 is more than max_tokens 2"),
        (sampled(seed=-1), "seed must be a whole number"),
        (sampled(seed=2**64), "seed must be a whole number"),
        (sampled(logprobs=21), "logprobs must be a whole number, 0 to 20, found 21"),
        (sampled(logit_bias=((11, 1.0),)), "logit_bias: token id 11 is not in the vocabulary"),
        (sampled(logit_bias=((1, math.inf),)), "logit_bias of token 1 must be a number"),
        (sampled(logit_bias=((1, math.nan),)), "logit_bias of token 1 must be a number"),
        (sampled(logit_bias=((1, 10**400),)), "logit_bias of token 1 must be a number"),
        (sampled(stop_token_ids=frozenset({11})), "stop token id 11 is not in the vocabulary"),
        (sampled(stop_token_ids=frozenset({"a"})), "stop token id 'a' is not in the vocabulary"),
        (replace(sampled(), deadline_ns="soon"), "deadline_ns must be a whole number"),
        (replace(sampled(), deadline_ns=math.nan), "deadline_ns must be a whole number"),
    ],
)
def test_what_can_never_be_served_is_refused_and_leaves_no_trace(
    refused: Request, message: str
) -> None:
    scheduler = Scheduler(PAGED)
    scheduler.add(request("taken"), 0)
    with pytest.raises(RequestError, match=message):
        scheduler.add(refused, 0)
    assert (scheduler.queued, scheduler.running) == (1, 0)


def test_a_request_that_all_pages_cannot_hold_is_refused() -> None:
    with pytest.raises(RequestError, match="more than the 20 tokens of a request"):
        Scheduler(replace(PAGED, pages=5)).add(request("a", prompt=19), 0)


def test_an_end_says_when_its_request_was_first_let_in() -> None:
    """Not when it was let in again after it gave way."""
    limits = replace(PAGED, pages=5, max_requests=2)
    scheduler, runner = Scheduler(limits), strict(limits)
    scheduler.add(request("a", prompt=6, max_tokens=6), 0)
    scheduler.add(request("b", prompt=6, max_tokens=6), 0)
    scheduler.add(request("c"), 7)
    admitted: dict[str, int | None] = {}
    for now_ns in range(100, 10_000, 100):
        if (batch := scheduler.schedule(now_ns)) == Batch():
            break
        for event in scheduler.finish(execute(batch, runner), now_ns):
            if event.finish:
                admitted[event.request_id] = event.admitted_ns
    assert scheduler.preemptions == 1
    last_ns = admitted.pop("c")
    assert admitted == {"a": 100, "b": 100}
    assert last_ns is not None
    assert last_ns > 100
