"""Do two engines say the same? The same prompts through both, and what differs.

Once with the first engine's own tokens fed to both, position by position, so that one early
difference does not hide what follows; and once with each left to go on by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_rt.core import FinishReason, Request, SamplingParams, TokenEvent
from edge_rt.errors import ConfigError, EngineError
from edge_rt.loop import Loop
from edge_rt.runtime import selfcheck
from edge_rt.runtime.base import Runner

F32 = npt.NDArray[np.float32]
Prompt = tuple[int, ...]

# A difference of two logits that the arithmetic of an engine can turn round.
NEAR_TIE = 1e-2


@dataclass(frozen=True, slots=True)
class Parity:
    """What two engines have in common over `prompts` prompts.

    `positions` logits were compared: the largest difference, the mean Kullback-Leibler divergence
    in nats, how often the likeliest token is the same, and how often it is not though the first
    engine's best two lie more than NEAR_TIE apart (`disagreements`). `same_tokens` of `tokens`
    greedy ones are those before a prompt's first difference.
    """

    prompts: int
    positions: int
    max_abs_logit_diff: float
    mean_kl: float
    top1_agreement: float
    disagreements: int
    tokens: int
    same_tokens: int
    identical_prompts: int


def compare(first: Runner, second: Runner, prompts: Sequence[Prompt], max_tokens: int) -> Parity:
    """Continue `prompts` by `max_tokens` tokens; ConfigError if the engines cannot be compared."""
    if first.limits.vocab_size != second.limits.vocab_size:
        raise ConfigError(
            f"the bundles have vocabularies of {first.limits.vocab_size} and "
            f"{second.limits.vocab_size}; compare bundles of one checkpoint"
        )
    ours, theirs = (greedy(engine, prompts, max_tokens) for engine in (first, second))
    reports, disagreements = [], 0
    for prompt, tokens in zip(prompts, ours, strict=True):
        text = (*prompt, *tokens[:-1])  # the last token is only read off
        expected, found = (
            selfcheck.forced_logits(engine, text, len(prompt) - 1) for engine in (first, second)
        )
        reports.append(selfcheck.report(expected, found))
        disagreements += _disagreements(expected, found)
    positions = [report.positions for report in reports]
    same = [_common(a, b) for a, b in zip(ours, theirs, strict=True)]
    return Parity(
        prompts=len(prompts),
        positions=sum(positions),
        max_abs_logit_diff=max(report.max_abs_logit_diff for report in reports),
        mean_kl=float(np.average([report.mean_kl for report in reports], weights=positions)),
        top1_agreement=float(
            np.average([report.top1_agreement for report in reports], weights=positions)
        ),
        disagreements=disagreements,
        tokens=sum(len(tokens) for tokens in ours),
        same_tokens=sum(same),
        identical_prompts=sum(a == b for a, b in zip(ours, theirs, strict=True)),
    )


def greedy(engine: Runner, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
    """What each prompt is continued with, all in one batch; EngineError if one fails."""
    loop = Loop(engine)
    tokens: dict[str, list[int]] = {f"{place}": [] for place in range(len(prompts))}
    failures: list[str] = []

    def on_event(event: TokenEvent) -> None:
        if event.finish is FinishReason.ERROR:
            failures.append(event.message)
        if event.token is not None:
            tokens[event.request_id].append(event.token.id)

    for name, prompt in zip(tokens, prompts, strict=True):
        loop.submit(Request(name, prompt, SamplingParams(max_tokens)), on_event)
    loop.run_until_idle()
    if failures:
        raise EngineError(failures[0])
    return list(tokens.values())


def _disagreements(expected: F32, found: F32) -> int:
    """Positions where another token is the likeliest, near-ties of the first engine left out."""
    second, first = np.sort(expected, axis=1)[:, -2:].T
    differs = expected.argmax(1) != found.argmax(1)
    return int(np.count_nonzero(differs & (first - second > NEAR_TIE)))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of what both begin with."""
    pairs = enumerate(zip(first, second, strict=True))
    return next((at for at, (a, b) in pairs if a != b), len(first))
