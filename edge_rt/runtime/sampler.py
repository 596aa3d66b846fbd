"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_rt.core import Draw, SampledToken
from edge_rt.errors import EngineError
from edge_rt.runtime import processors
from edge_rt.runtime.processors import Scores
from edge_rt.runtime.rng import uniform


def sample_rows(logits: Scores, draws: Sequence[Draw]) -> tuple[SampledToken, ...]:
    """The next token of each row of `logits` [rows, vocab], chosen as its draw in `draws` says.

    At temperature 0 that is the likeliest, the lower token on a tie. Else it is drawn by inversion:
    the remaining tokens, ascending, share out [0, 1) by their probabilities, and the token is the
    one whose share holds the number that `rng.uniform` gives for the seed, the draw's row and the
    length of its output. So a row's tokens do not depend on the rest of the batch. `logits` is only
    read.

    Log-probabilities are the softmax's over `logits`, in float64. The likeliest are in descending
    order, the lower token first on a tie; tokens of probability 0 are not among them.

    EngineError if a row holds NaN or plus infinity, or nothing above minus infinity: whatever token
    it gave would mean nothing.
    """
    assert len(logits) == len(draws), f"{len(logits)} rows of logits for {len(draws)} draws"
    likeliest = logits.argmax(axis=1)
    # argmax finds the first NaN, else the largest: that one speaks for its row.
    if not np.isfinite(logits[np.arange(len(logits)), likeliest]).all():
        raise EngineError(
            "the engine's logits are not finite: the bundle or the engine is damaged; "
            "check it with edge-rt verify"
        )
    return tuple(
        _sample(row, draw, greedy)
        for row, draw, greedy in zip(logits, draws, likeliest.tolist(), strict=True)
    )


def _sample(row: Scores, draw: Draw, greedy: int) -> SampledToken:
    is_adjusted = processors.is_adjusted(draw)
    scores = processors.adjusted(row, draw) if is_adjusted else row
    if draw.sampling.temperature > 0:
        token = _draw(scores, draw)
    else:
        token = int(scores.argmax()) if is_adjusted else greedy
    count = draw.sampling.logprobs
    return SampledToken(token) if count is None else _with_logprobs(row, token, count)


def _draw(scores: Scores, draw: Draw) -> int:
    ids, weights = processors.remaining(scores, draw.sampling)
    cumulative = weights.cumsum()
    # Below the sum of all, even when rounded: the number is at most 1 - 2^-53. And to the right of
    # what equals it: a token of weight 0 is never drawn.
    target = uniform(draw.sampling.seed, draw.row, len(draw.output)) * cumulative[-1]
    return int(ids[np.searchsorted(cumulative, target, side="right")])


def _with_logprobs(row: Scores, token: int, count: int) -> SampledToken:
    logprobs = np.subtract(row, row.max(), dtype=np.float64)
    logprobs -= np.log(np.exp(logprobs).sum())
    top: tuple[tuple[int, float], ...] = ()
    if count > 0:
        ids = processors.largest(row, count) if count < len(row) else np.arange(len(row))
        ids = ids[row[ids] > -np.inf]
        ids = ids[np.argsort(-row[ids], kind="stable")][:count]  # ids ascend where logits tie
        top = tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return SampledToken(token, float(logprobs[token]), top)
