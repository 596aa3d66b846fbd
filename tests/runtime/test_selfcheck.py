from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from edge_rt.bundle import Bundle, Tolerance
from edge_rt.core import DecodeRow, Limits, PrefillChunk
from edge_rt.errors import EngineError
from edge_rt.golden import Golden, GoldenPrompt
from edge_rt.runtime.base import Sampled
from edge_rt.runtime.engines import open_engine
from edge_rt.runtime.selfcheck import compare, report

VOCAB = 7


class Parrot:
    """Answers with logits that depend on all tokens so far, as a model does; `error` is added."""

    def __init__(self, max_context: int = 32, error: float = 0.0) -> None:
        self.limits = Limits(4, 4, 16, 3, 8, 4, max_context, VOCAB)
        self.error = error
        self.seen: list[int] = []
        self.calls: list[int] = []

    def prefill(self, chunks: Sequence[PrefillChunk], *, want_logits: bool = False) -> Sampled:
        (chunk,) = chunks
        if chunk.start == 0:
            self.seen = []
        assert chunk.start == len(self.seen)
        assert len(chunk.tokens) <= self.limits.prefill_chunk
        self.seen += chunk.tokens
        self.calls.append(len(chunk.tokens))
        if chunk.sampling is None:
            return Sampled((None,))
        return self._answer()

    def decode(self, rows: Sequence[DecodeRow], *, want_logits: bool = False) -> Sampled:
        (row,) = rows
        assert row.position == len(self.seen)
        self.seen.append(row.token)
        self.calls.append(1)
        return self._answer()

    def close(self) -> None:
        pass

    def _answer(self) -> Sampled:
        logits = expected(self.seen) + np.float32(self.error)
        return Sampled((int(logits.argmax()),), logits[None])


def expected(tokens: Sequence[int]) -> np.ndarray:
    return np.random.default_rng([*tokens]).normal(size=VOCAB).astype(np.float32)


@pytest.fixture
def golden() -> Golden:
    prompts = []
    for tokens in ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], [6, 5]):
        start = max(len(tokens) - 4, 0)
        logits = np.stack([expected(tokens[: i + 1]) for i in range(start, len(tokens))])
        prompts.append(GoldenPrompt(np.array(tokens, np.int32), logits))
    return Golden(tuple(prompts))


def test_prefill_and_decoding_are_both_compared(golden: Golden) -> None:
    runner = Parrot()
    found = compare(runner, golden)
    assert found.positions == 6
    assert found.max_abs_logit_diff == 0
    assert found.top1_agreement == 1
    assert runner.calls == [3, 3, 1, 1, 1, 1, 1, 1]
    found.check(Tolerance(0.0, 1e-12))


def test_an_error_is_named(golden: Golden) -> None:
    found = compare(Parrot(error=0.5), golden)
    assert found.max_abs_logit_diff == pytest.approx(0.5, abs=1e-6)
    with pytest.raises(EngineError, match=r"max_abs_logit_diff is 0\.5, .* tolerance is 0\.1"):
        found.check(Tolerance(0.1, 1.0))


def test_not_a_number_is_a_mismatch(golden: Golden) -> None:
    found = compare(Parrot(error=float("nan")), golden)
    with pytest.raises(EngineError, match="golden logits differ"):
        found.check(Tolerance(1e9, 1e9))


def test_kl_against_a_float64_formulation() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, VOCAB)).astype(np.float32)
    p = np.exp(a.astype(np.float64)) / np.exp(a.astype(np.float64)).sum(-1, keepdims=True)
    q = np.exp(b.astype(np.float64)) / np.exp(b.astype(np.float64)).sum(-1, keepdims=True)
    assert report(a, b).mean_kl == pytest.approx((p * np.log(p / q)).sum(-1).mean())


def test_a_context_shorter_than_the_golden_prompts(golden: Golden) -> None:
    with pytest.raises(EngineError, match="raise max_context"):
        compare(Parrot(max_context=8), golden)


def test_the_demo_engines(demo_bundle: Callable[[str], Path]) -> None:
    for recipe, bound in (("demo.cpu", 1e-2), ("demo.cpu-exact", 1e-6)):
        bundle = Bundle.load(demo_bundle(recipe))
        runner = open_engine(bundle)
        found = compare(runner, Golden.load(bundle.path / "golden.safetensors"))
        runner.close()
        assert found.mean_kl < bound
        assert bundle.manifest.tolerance is not None
        found.check(bundle.manifest.tolerance)
