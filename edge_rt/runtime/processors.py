"""What sampling settings do to one row of logits; the order is Hugging Face transformers'.

First the settings that change scores (`adjusted`): repetition penalty, presence and frequency
penalties, bias, the mask of `min_tokens`. Then those that leave tokens out (`remaining`), at the
row's temperature: top-k, top-p, min-p. Settings are taken to be valid: finite, and in their range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import numpy as np
import numpy.typing as npt

from edge_rt.core import Draw, SamplingParams

Scores = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]
Weights = npt.NDArray[np.float64]


def is_adjusted(draw: Draw) -> bool:
    """Whether `adjusted` changes anything; if not, the row need not be copied."""
    sampling = draw.sampling
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or bool(sampling.logit_bias)
        or _masks_stop_tokens(draw)
    )


def adjusted(logits: Scores, draw: Draw) -> Scores:
    """`logits` [vocab] after penalties, bias and the mask of `min_tokens`: a new array.

    Settings that would leave no token at all are passed over, and `logits` itself is returned: one
    row's settings must not fail the batch. Tokens outside the vocabulary are ignored.

    Sources: for the repetition penalty Keskar et al. 2019 (arXiv:1909.05858), section 4.1; OpenAI's
    API reference for the other two.
    """
    sampling = draw.sampling
    scores = logits.copy()
    with np.errstate(over="ignore", invalid="ignore"):  # the highest score tells of both
        if sampling.repetition_penalty != 1:
            _penalize_repetition(scores, draw)
        if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
            _penalize_output(scores, draw)
        for token, bias in sampling.logit_bias:
            if 0 <= token < len(scores):  # a negative one would count from the end
                scores[token] += bias
        if _masks_stop_tokens(draw):
            scores[_ids_within(len(scores), sampling.stop_token_ids)] = -np.inf
        return scores if np.isfinite(scores.max()) else logits


def remaining(scores: Scores, sampling: SamplingParams) -> tuple[Ids, Weights]:
    """Tokens that top-k, top-p and min-p leave of `scores` [vocab], ascending, and their weights.

    A weight is the token's probability at the row's temperature, in units of the likeliest token's.
    The highest score is finite and `temperature` above 0. Tokens that tie with the k-th likeliest
    remain too; of those that tie where top-p cuts, the lower ones remain. One token always does.

    Sources: top-k, Fan et al. 2018 (arXiv:1805.04833); top-p, Holtzman et al. 2020
    (arXiv:1904.09751); min-p, Nguyen et al. 2024 (arXiv:2407.01082).
    """
    highest = scores.max()
    if 0 < sampling.top_k < len(scores):
        ids = largest(scores, sampling.top_k)
        scores = scores[ids]
    else:
        ids = np.arange(len(scores))
    below = np.subtract(scores, highest, dtype=np.float64)
    with np.errstate(over="ignore"):  # at the lowest temperatures: to minus infinity, rightly
        below /= sampling.temperature
    if sampling.top_p < 1:
        kept = _nucleus(np.exp(below), sampling.top_p)
        ids, below = ids[kept], below[kept]
    if sampling.min_p > 0:
        kept = np.flatnonzero(below >= math.log(sampling.min_p))
        ids, below = ids[kept], below[kept]
    return ids, np.exp(below)


def largest(scores: Scores, count: int) -> Ids:
    """Indices, ascending, of the `count` largest scores and of all that tie with the least of them.

    `count` is at least 1 and below the number of scores.
    """
    place = len(scores) - count
    return np.flatnonzero(scores >= np.partition(scores, place)[place])


def _nucleus(weights: Weights, top_p: float) -> Ids:
    """Indices, ascending, of the smallest set that has `top_p` of the whole weight."""
    total = weights.sum()
    # Those below (1 - top_p) of the mean weigh less than 1 - top_p together, so the set does
    # without them, and few are left to sort.
    indices = np.flatnonzero(weights >= (1 - top_p) * total / len(weights))
    weights = weights[indices]
    descending = np.sort(weights)[::-1]
    size = int(np.searchsorted(descending.cumsum(), top_p * total)) + 1
    if size >= len(indices):
        return indices
    kept = weights > descending[size - 1]
    ties = np.flatnonzero(weights == descending[size - 1])
    kept[ties[: size - np.count_nonzero(kept)]] = True
    return indices[kept]


def _masks_stop_tokens(draw: Draw) -> bool:
    return len(draw.output) < draw.sampling.min_tokens and bool(draw.sampling.stop_token_ids)


def _penalize_repetition(scores: Scores, draw: Draw) -> None:
    # A token that occurs twice is written twice, with the same score.
    ids = _ids_within(len(scores), chain(draw.prompt, draw.output))
    seen = scores[ids].astype(np.float64)
    penalty = draw.sampling.repetition_penalty
    scores[ids] = np.where(seen < 0, seen * penalty, seen / penalty)


def _penalize_output(scores: Scores, draw: Draw) -> None:
    ids, counts = np.unique(_ids_within(len(scores), draw.output), return_counts=True)
    sampling = draw.sampling
    scores[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _ids_within(vocab_size: int, tokens: Iterable[int]) -> Ids:
    ids = np.fromiter(tokens, np.intp)
    return ids[(ids >= 0) & (ids < vocab_size)]
