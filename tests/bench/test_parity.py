"""Parity of engines: with themselves, with one that computes otherwise, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_rt.bench import parity
from edge_rt.bundle import Bundle
from edge_rt.core import DecodeRow, PrefillChunk
from edge_rt.errors import ConfigError, EngineError
from edge_rt.recipes import NullOptions
from edge_rt.runtime.base import Runner, Sampled
from edge_rt.runtime.engines import open_engine
from edge_rt.runtime.null import NullRunner

BundleFactory = Callable[[str], Path]
PROMPTS = [(5, 6, 7), tuple(range(1, 80)), (900,)]


@pytest.fixture
def engine(demo_bundle: BundleFactory) -> Runner:
    return open_engine(Bundle.load(demo_bundle("demo.cpu")))


class Shifted(NullRunner):
    """The null engine, but every logit of one token is raised by `by`."""

    by = 0.0

    def prefill(self, chunks: Sequence[PrefillChunk], *, want_logits: bool = False) -> Sampled:
        return self._raised(super().prefill(chunks, want_logits=want_logits))

    def decode(self, rows: Sequence[DecodeRow], *, want_logits: bool = False) -> Sampled:
        return self._raised(super().decode(rows, want_logits=want_logits))

    def _raised(self, sampled: Sampled) -> Sampled:
        if sampled.logits is not None:
            sampled.logits[:, 17] += self.by
        return sampled


def shifted(engine: Runner, by: float) -> Runner:
    runner = Shifted(engine.limits, NullOptions())
    runner.by = by
    return runner


def test_an_engine_is_its_own_equal(engine: Runner) -> None:
    found = parity.compare(engine, engine, PROMPTS, 6)
    assert (found.prompts, found.positions, found.tokens) == (3, 18, 18)
    assert (found.max_abs_logit_diff, found.mean_kl, found.disagreements) == (0.0, 0.0, 0)
    assert (found.top1_agreement, found.same_tokens, found.identical_prompts) == (1.0, 18, 3)


def test_another_engine_is_not(engine: Runner) -> None:
    null = NullRunner(engine.limits, NullOptions())
    found = parity.compare(engine, null, PROMPTS, 6)
    assert found.max_abs_logit_diff > 1
    assert found.mean_kl > 1
    assert found.disagreements > 9
    assert found.same_tokens < 9
    assert found.identical_prompts == 0


@pytest.mark.parametrize(("by", "differ"), [(0.5, 0), (0.999, 0), (1.5, 18)])
def test_differences_are_measured(engine: Runner, by: float, differ: int) -> None:
    """The null engine's likeliest logit is 1, all others are 0."""
    null = shifted(engine, 0.0)
    found = parity.compare(null, shifted(engine, by), PROMPTS, 6)
    assert found.max_abs_logit_diff == pytest.approx(by)
    assert found.disagreements == differ
    assert found.top1_agreement == 1 - differ / 18


def test_near_ties_are_no_disagreement() -> None:
    expected = np.array([[0.0, 1.0, 1.009], [0.0, 1.0, 1.02]], np.float32)
    found = np.array([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]], np.float32)
    assert parity._disagreements(expected, found) == 1


class Dead(NullRunner):
    """Fails at the first decode call."""

    def decode(self, rows: Sequence[DecodeRow], *, want_logits: bool = False) -> Sampled:
        raise EngineError("the device is lost")


def test_an_engine_that_fails_has_no_parity(engine: Runner) -> None:
    dead = Dead(engine.limits, NullOptions())
    for pair in ((engine, dead), (dead, engine)):
        with pytest.raises(EngineError, match="the device is lost"):
            parity.compare(*pair, PROMPTS, 6)


def test_bundles_of_other_vocabularies_are_refused(engine: Runner) -> None:
    other = NullRunner(replace(engine.limits, vocab_size=9), NullOptions())
    with pytest.raises(ConfigError, match="vocabularies of 3072 and 9"):
        parity.compare(engine, other, PROMPTS, 6)
