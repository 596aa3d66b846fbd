"""Golden logits: does the engine say what the float32 reference said?

Each prompt is prefilled in the engine's own chunks and then continued token by token with the
prompt's own tokens, so that both ways through the engine are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_rt.bundle import Bundle, Tolerance
from edge_rt.core import DecodeRow, Draw, PrefillChunk, SamplingParams
from edge_rt.errors import EngineError
from edge_rt.golden import GOLDEN_FILE, Golden, GoldenPrompt
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


def check(runner: Runner, bundle: Bundle) -> GoldenReport | None:
    """Compare an engine with its bundle's golden logits; None where an engine computes none.

    EngineError if it is out of tolerance, BundleError if the golden logits cannot be read.
    """
    tolerance = bundle.manifest.tolerance
    if tolerance is None:
        return None
    found = compare(runner, Golden.load(bundle.path / GOLDEN_FILE))
    found.check(tolerance)
    return found


def compare(runner: Runner, golden: Golden) -> GoldenReport:
    """Run every golden prompt; EngineError if a prompt does not fit the engine."""
    expected = [prompt.logits for prompt in golden.prompts]
    vocab_size = expected[0].shape[1]
    if vocab_size != runner.limits.vocab_size:
        raise EngineError(
            f"the golden logits are of a vocabulary of {vocab_size}, the engine's has "
            f"{runner.limits.vocab_size}; rebuild the bundle with edge-rt build"
        )
    found = [_logits(runner, prompt) for prompt in golden.prompts]
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


def forced_logits(runner: Runner, tokens: Sequence[int], start: int) -> F32:
    """Logits [tokens - start, vocab] at each of `tokens` from `start` on, which the engine is fed.

    Up to `start` in one prefill, in the engine's own chunks, then token by token.
    """
    limits, draw = runner.limits, Draw(SamplingParams(), 0, (), ())
    pages = tuple(range(-(-len(tokens) // limits.page_tokens)))
    found: list[F32] = []
    for first in range(0, start + 1, limits.prefill_chunk):
        part = tuple(tokens[first : min(first + limits.prefill_chunk, start + 1)])
        is_last = first + len(part) == start + 1
        chunk = PrefillChunk("forced", pages, first, part, (draw,) if is_last else ())
        sampled = runner.prefill([chunk], want_logits=True)
    assert sampled.logits is not None
    found.append(sampled.logits)
    for position in range(start + 1, len(tokens)):
        row = DecodeRow("forced", pages, position, tokens[position], draw)
        sampled = runner.decode([row], want_logits=True)
        assert sampled.logits is not None
        found.append(sampled.logits)
    return np.concatenate(found)


def _logits(runner: Runner, prompt: GoldenPrompt) -> F32:
    tokens = prompt.tokens.tolist()
    if len(tokens) > runner.limits.max_context:
        raise EngineError(
            f"the golden prompts have {len(tokens)} tokens, the engine's max_context is "
            f"{runner.limits.max_context}; raise max_context in the engine recipe and build again"
        )
    return forced_logits(runner, tokens, prompt.start)
