from __future__ import annotations

import time

import numpy as np

from edge_rt.core import DecodeRow, Draw, Limits, PrefillChunk, SampledToken, SamplingParams
from edge_rt.recipes import NullOptions
from edge_rt.runtime.base import Runner
from edge_rt.runtime.null import NullRunner, next_token

LIMITS = Limits(
    max_requests=4,
    max_rows=4,
    max_tokens_per_step=16,
    prefill_chunk=4,
    pages=8,
    page_tokens=8,
    max_context=32,
    vocab_size=11,
)
GREEDY = Draw(SamplingParams(), 0, (), ())


def null(options: NullOptions | None = None) -> Runner:
    return NullRunner(LIMITS, options or NullOptions())


def chunk(name: str, page: int, *, start: int = 0, last: bool = True) -> PrefillChunk:
    return PrefillChunk(name, (page,), start, (3, 1, 4), (GREEDY,) if last else ())


def row(name: str, page: int, *, token: int = 3, position: int = 5) -> DecodeRow:
    return DecodeRow(name, (page,), position, token, GREEDY)


def test_only_a_prompts_last_chunk_samples() -> None:
    sampled = null().prefill([chunk("a", 0, last=False), chunk("b", 1)])
    assert sampled.tokens == (SampledToken(next_token(4, 2, 11)),)
    assert sampled.logits is None


def test_a_row_yields_the_same_token_in_any_company() -> None:
    rows = [row("a", 0, token=7), row("b", 1, position=2), row("c", 2)]
    together = null().decode(rows).tokens
    assert together == tuple(null().decode([alone]).tokens[0] for alone in rows)


def test_rows_of_one_request_go_apart() -> None:
    draws = tuple(GREEDY._replace(row=row) for row in range(4))
    tokens = null().prefill([chunk("a", 0)._replace(draws=draws)]).tokens
    assert len({token.id for token in tokens}) == 4
    row_2 = row("a", 0, token=4, position=2)._replace(draw=draws[2])
    assert null().decode([row_2]).tokens == (tokens[2],)


def test_prefill_and_decode_agree_on_what_follows_a_token() -> None:
    assert null().prefill([chunk("a", 0)]).tokens == (
        null().decode([row("a", 0, token=4, position=2)]).tokens
    )


def test_the_largest_logit_is_the_token() -> None:
    rows = [row("a", 0, token=7), row("b", 1, position=2)]
    decoded = null().decode(rows, want_logits=True)
    assert decoded.logits is not None
    assert decoded.logits.dtype == np.float32
    assert decoded.logits.shape == (2, 11)
    assert decoded.logits.argmax(axis=1).tolist() == [token.id for token in decoded.tokens]


def test_logits_hold_only_the_rows_that_sampled() -> None:
    sampled = null().prefill([chunk("a", 0, last=False), chunk("b", 1)], want_logits=True)
    assert sampled.logits is not None
    assert sampled.logits.argmax(axis=1).tolist() == [sampled.tokens[0].id]


def test_tokens_are_uniform_over_the_vocabulary() -> None:
    counts = np.bincount(
        [next_token(token, position, 11) for token in range(11) for position in range(1000)],
        minlength=11,
    )
    assert len(counts) == 11
    assert np.all(abs(counts - 1000) < 150)  # five standard deviations


def test_tokens_are_the_same_on_every_machine() -> None:
    assert [next_token(token, 7, 50400) for token in (0, 1, 50399)] == [19834, 23445, 47481]


def test_a_step_takes_the_modelled_time() -> None:
    runner = null(NullOptions(step_ms=10, row_ms=10))
    begun = time.monotonic()
    runner.decode([row("a", 0), row("b", 1)])
    assert time.monotonic() - begun >= 0.03


def test_close_may_be_called_twice() -> None:
    runner = null()
    runner.close()
    runner.close()
