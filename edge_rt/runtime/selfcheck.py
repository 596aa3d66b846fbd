"""Golden logits: does the engine say what the float32 reference said?

Each prompt is prefilled in the engine's own chunks and then continued token by token with the
prompt's own tokens, so that both ways through the engine are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_rt.bundle import Tolerance
from edge_rt.core import DecodeRow, Draw, Limits, PrefillChunk, SamplingParams
from edge_rt.errors import EngineError
from edge_rt.golden import Golden, GoldenPrompt
from edge_rt.runtime.base import Runner

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GoldenReport:
    """Distance from the reference over all golden positions; KL divergence in nats."""

    positions: int
    max_abs_logit_diff: float
    mean_kl: float
    top1_agreement: float

    def check(self, tolerance: Tolerance) -> None:
        """EngineError that names the first figure out of tolerance."""
        for name in ("max_abs_logit_diff", "mean_kl"):
            found, allowed = getattr(self, name), getattr(tolerance, name)
            if not found <= allowed:  # a NaN is a mismatch too
                raise EngineError(
                    f"golden logits differ: {name} is {found:.3g}, this engine's tolerance is "
                    f"{allowed:.3g}; rebuild the bundle with edge-rt build"
                )


def compare(runner: Runner, golden: Golden) -> GoldenReport:
    """Run every golden prompt; EngineError if a prompt does not fit the engine."""
    expected = [prompt.logits for prompt in golden.prompts]
    vocab_size = expected[0].shape[1]
    if vocab_size != runner.limits.vocab_size:
        raise EngineError(
            f"the golden logits are of a vocabulary of {vocab_size}, the engine's has "
            f"{runner.limits.vocab_size}; rebuild the bundle with edge-rt build"
        )
    found = [np.concatenate(list(_logits(runner, prompt))) for prompt in golden.prompts]
    return report(np.concatenate(expected), np.concatenate(found))


def report(expected: F32, found: F32) -> GoldenReport:
    """Compare logits [positions, vocab]."""
    p, q = _log_softmax(expected), _log_softmax(found)
    return GoldenReport(
        positions=len(expected),
        max_abs_logit_diff=float(np.abs(expected - found).max()),
        mean_kl=float((np.exp(p) * (p - q)).sum(-1).mean()),
        top1_agreement=float((expected.argmax(-1) == found.argmax(-1)).mean()),
    )


def _log_softmax(logits: F32) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _logits(runner: Runner, prompt: GoldenPrompt) -> Iterator[F32]:
    limits, tokens = runner.limits, prompt.tokens.tolist()
    if len(tokens) > limits.max_context:
        raise EngineError(
            f"the golden prompts have {len(tokens)} tokens, the engine's max_context is "
            f"{limits.max_context}; raise max_context in the engine recipe and build again"
        )
    pages = tuple(range(-(-len(tokens) // limits.page_tokens)))
    draw = Draw(SamplingParams(), 0, (), ())
    for chunk in _chunks(limits, tokens[: prompt.start + 1], pages, draw):
        sampled = runner.prefill([chunk], want_logits=True)
    assert sampled.logits is not None
    yield sampled.logits
    for position in range(prompt.start + 1, len(tokens)):
        row = DecodeRow("golden", pages, position, tokens[position], draw)
        sampled = runner.decode([row], want_logits=True)
        assert sampled.logits is not None
        yield sampled.logits


def _chunks(
    limits: Limits, tokens: list[int], pages: tuple[int, ...], draw: Draw
) -> Iterator[PrefillChunk]:
    for start in range(0, len(tokens), limits.prefill_chunk):
        part = tuple(tokens[start : start + limits.prefill_chunk])
        last = start + len(part) == len(tokens)
        yield PrefillChunk("golden", pages, start, part, (draw,) if last else ())
