from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPTJForCausalLM

from edge_rt.bench import perplexity
from edge_rt.bench.perplexity import (
    FloatModel,
    Score,
    agreement,
    difference,
    of_checkpoint,
    of_quantized,
    score_bundle,
    score_engine,
    score_model,
    windows,
)
from edge_rt.bundle import Bundle
from edge_rt.core import Limits
from edge_rt.errors import CheckpointError, ConfigError, EngineError
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.device import Device, DeviceName
from edge_rt.model.gptj import Head, Layer
from edge_rt.quant.store import QuantizedCheckpoint
from edge_rt.recipes import NullOptions, data_dir
from edge_rt.runtime.base import Logits
from edge_rt.runtime.null import NullRunner, next_token
from edge_rt.tokenizer import Tokenizer

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

CPU = Device.open("cpu")
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)


def held_out(demo: Path, count: int, context: int) -> I64:
    text = (data_dir("calib") / "heldout.txt").read_text(encoding="utf-8")[:60_000]
    return windows(Tokenizer.load(demo).encode(text), context)[:count]


def by_transformers(path: Path, cut: I64) -> tuple[float, npt.NDArray[np.float32]]:
    """The perplexity, its likelihoods in float64, and the logits of the predicted positions."""
    model = GPTJForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(cut)).logits[:, :-1]
    likelihood = torch.log_softmax(logits.double(), -1)
    wanted = likelihood.gather(-1, torch.from_numpy(cut[:, 1:])[..., None])
    return float(torch.exp(-wanted.mean())), logits.numpy()


def check_greedy(found: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> None:
    """The most likely token, or one that is as likely up to rounding."""
    best = np.take_along_axis(logits, found[..., None].astype(np.int64), -1)[..., 0]
    assert (logits.max(-1) - best).max() < 1e-4


@given(st.integers(0, 200), st.integers(2, 40))
def test_windows_are_the_text_without_its_remainder(length: int, context: int) -> None:
    tokens = list(range(length))
    if length < context:
        with pytest.raises(ConfigError, match=f"{length} tokens are fewer than one window of"):
            windows(tokens, context)
        return
    cut = windows(tokens, context)
    assert cut.dtype == np.int64
    assert cut.shape[1] == context
    assert cut.reshape(-1).tolist() == tokens[: length - length % context]


def test_a_window_of_one_token_predicts_nothing() -> None:
    with pytest.raises(ConfigError, match="predicts nothing; give 2 or more"):
        windows([1, 2, 3], 1)


@pytest.mark.parametrize(("count", "context"), [(9, 128), (2, 512), (40, 2), (1, 511)])
def test_the_demo_as_transformers_scores_it(
    demo_checkpoint: Path, count: int, context: int
) -> None:
    cut = held_out(demo_checkpoint, count, context)
    found = score_model(of_checkpoint(Checkpoint.open(demo_checkpoint)), cut, CPU)
    expected, logits = by_transformers(demo_checkpoint, cut)
    assert found.perplexity == pytest.approx(expected, rel=1e-5)
    assert found.predicted_tokens == count * (context - 1)
    assert found.nll.dtype == np.float64
    assert found.greedy.dtype == np.int32
    check_greedy(found.greedy, logits)
    right = (logits.argmax(-1) == cut[:, 1:]).mean()
    assert found.top1_accuracy == pytest.approx(right, abs=2 / found.predicted_tokens)


def test_a_random_model_as_transformers_scores_it(random_gptj: Callable[..., Path]) -> None:
    path = random_gptj(64, 2, 16)
    cut = np.random.default_rng(1).integers(0, 3072, (33, 64))
    found = score_model(of_checkpoint(Checkpoint.open(path)), cut, CPU)
    expected, logits = by_transformers(path, cut)
    assert found.perplexity == pytest.approx(expected, rel=1e-5)
    check_greedy(found.greedy, logits)


def test_blocks_and_batches_change_nothing(
    demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cut = of_checkpoint(Checkpoint.open(demo_checkpoint)), held_out(demo_checkpoint, 7, 64)
    whole, shares, read = score_model(model, cut, CPU), [], []

    def layer(index: int) -> Layer:
        read.append(index)
        return model.layer(index)

    monkeypatch.setattr(perplexity, "BLOCK_BYTES", 3 * 64 * 384 * 4)
    monkeypatch.setattr(Device, "batch_tokens", 2 * 64)
    parts = score_model(dataclasses.replace(model, layer=layer), cut, CPU, shares.append)
    assert parts.nll == pytest.approx(whole.nll, rel=1e-6)
    assert (parts.greedy == whole.greedy).mean() > 0.995
    assert read == [0, 1, 2, 3] * 3  # once for each block of 3 windows
    assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize("name", ["torch-cpu", CUDA])
def test_devices_agree(demo_checkpoint: Path, name: DeviceName) -> None:
    model, cut = of_checkpoint(Checkpoint.open(demo_checkpoint)), held_out(demo_checkpoint, 5, 128)
    host, other = (score_model(model, cut, Device.open(device)) for device in ("cpu", name))
    assert isinstance(other.nll, np.ndarray)
    assert other.nll == pytest.approx(host.nll, rel=1e-5)
    assert agreement(host, other) > 0.99


def test_the_exact_bundle_is_its_checkpoint(
    demo_quantized: Path, demo_bundle: Callable[[str], Path]
) -> None:
    cut = held_out(demo_quantized, 11, 40)  # 8 rows: a full block and a rest
    shares: list[float] = []
    found = score_bundle(Bundle.load(demo_bundle("demo.cpu-exact")), cut, shares.append)
    expected = score_model(of_quantized(QuantizedCheckpoint.open(demo_quantized)), cut, CPU)
    assert found.nll == pytest.approx(expected.nll, rel=1e-4)
    assert agreement(found, expected) > 0.995
    assert sum(shares) == pytest.approx(1)


def test_int8_activations_cost_little(
    demo_quantized: Path, demo_bundle: Callable[[str], Path]
) -> None:
    cut = held_out(demo_quantized, 8, 64)
    found = score_bundle(Bundle.load(demo_bundle("demo.cpu")), cut)
    expected = score_model(of_quantized(QuantizedCheckpoint.open(demo_quantized)), cut, CPU)
    assert found.perplexity == pytest.approx(expected.perplexity, rel=0.01)
    assert agreement(found, expected) > 0.93


PAGED = Limits(
    max_requests=4,
    max_rows=4,
    max_tokens_per_step=64,
    prefill_chunk=16,
    pages=11,
    page_tokens=8,
    max_context=64,
    vocab_size=100,
)


@settings(deadline=None)
@given(
    count=st.integers(1, 9),
    context=st.integers(2, 64),
    pages=st.integers(8, 20),
    rows=st.integers(1, 4),
)
def test_an_engine_is_fed_with_the_text(count: int, context: int, pages: int, rows: int) -> None:
    """The null engine asserts the protocol, and its next token is known."""
    limits = dataclasses.replace(PAGED, pages=pages, max_rows=rows)
    cut = np.random.default_rng(context).integers(0, 100, (count, context))
    cut[:, 1] = [next_token(int(token), 0, 100) for token in cut[:, 0]]
    found = score_engine(NullRunner(limits, NullOptions()), cut)
    expected = [
        [next_token(token, position, 100) for position, token in enumerate(row[:-1])]
        for row in cut.tolist()
    ]
    assert found.greedy.tolist() == expected
    # Its logits are 1 for that token and 0 for the 99 others.
    right = (np.array(expected) == cut[:, 1:]).sum(1)
    assert found.nll == pytest.approx(np.log(np.e + 99) * (context - 1) - right)


class MinusInfinity(NullRunner):
    """One logit that no check of the likeliest token sees."""

    def _logits(self, tokens: Sequence[int | None]) -> Logits:
        logits = super()._logits(tokens)
        logits[-1, 7] = -np.inf
        return logits


def test_an_engine_whose_logits_are_not_finite() -> None:
    with pytest.raises(EngineError, match="position 0 are not finite"):
        score_engine(MinusInfinity(PAGED, NullOptions()), np.ones((2, 8), np.int64))


def test_windows_beyond_the_engine() -> None:
    with pytest.raises(ConfigError, match="max_context of 64; give a smaller --context"):
        score_engine(NullRunner(PAGED, NullOptions()), np.ones((2, 65), np.int64))


def test_the_null_engine_has_no_perplexity(demo_bundle: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="computes nothing"):
        score_bundle(Bundle.load(demo_bundle("demo.null")), np.ones((2, 8), np.int64))


@pytest.fixture
def model(random_gptj: Callable[..., Path]) -> FloatModel:
    return of_checkpoint(Checkpoint.open(random_gptj(32, 2, 8)))


def test_a_layer_that_overflows_is_named(model: FloatModel) -> None:
    def layer(index: int) -> Layer:
        found = model.layer(index)
        return dataclasses.replace(found, ln_weight=found.ln_weight * np.float32(1e38 * index))

    with pytest.raises(CheckpointError, match="output of layer 1 holds values that are not finite"):
        score_model(dataclasses.replace(model, layer=layer), np.ones((2, 8), np.int64), CPU)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite(model: FloatModel, value: float) -> None:
    def head() -> Head:
        found = model.head()
        found.bias[5] = value
        return found

    with pytest.raises(CheckpointError, match="lm_head gives holds values that are not finite"):
        score_model(dataclasses.replace(model, head=head), np.ones((2, 8), np.int64), CPU)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 300), st.floats(0.01, 1000))
def test_likelihoods_of_any_logits(seed: int, rows: int, vocab: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, vocab)) * scale + scale).astype(np.float32)
    targets = rng.integers(0, vocab, rows)
    wide = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    expected = np.log(np.exp(wide).sum(-1)) - wide[np.arange(rows), targets]
    best = logits.argmax(-1)
    nll, greedy = perplexity._score_logits(logits, targets)
    assert nll == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert greedy.tolist() == best.tolist()


def score(nll: F64, seed: int = 0) -> Score:
    """Windows of 3 tokens with these sums; tokens and predictions of two kinds at random."""
    rng = np.random.default_rng(seed)
    cut = np.random.default_rng(0).integers(0, 2, (len(nll), 3))
    return Score(cut, nll, rng.integers(0, 2, (len(nll), 2)).astype(np.int32))


def plain_bootstrap(figure: Callable[[list[int]], float], count: int) -> tuple[float, float]:
    """Percentiles 2.5 and 97.5 of `figure` over resampled windows, one float64 at a time."""
    rng = np.random.default_rng(0)
    found = sorted(figure(rng.integers(count, size=count).tolist()) for _ in range(1000))

    def percentile(q: float) -> float:
        whole, part = divmod(q * (len(found) - 1), 1)
        return found[int(whole)] * (1 - part) + found[int(whole) + 1] * part

    return percentile(0.025), percentile(0.975)


def plain_perplexity(nll: F64, chosen: list[int]) -> float:
    total = 0.0
    for index in chosen:
        total += float(nll[index])
    return float(np.exp(total / (2 * len(chosen))))


@pytest.mark.parametrize("count", [2, 3, 40])
def test_intervals_are_those_of_a_plain_loop(count: int) -> None:
    rng = np.random.default_rng(count)
    a, b = rng.gamma(3.0, 1.5, (2, count))
    expected = plain_bootstrap(lambda chosen: plain_perplexity(a, chosen), count)
    assert score(a).interval() == pytest.approx(expected, rel=1e-9)
    expected = plain_bootstrap(
        lambda chosen: plain_perplexity(a, chosen) - plain_perplexity(b, chosen), count
    )
    found, interval = difference(score(a), score(b))
    everything = list(range(count))
    assert found == pytest.approx(plain_perplexity(a, everything) - plain_perplexity(b, everything))
    assert interval == pytest.approx(expected, rel=1e-9)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Normal windows: the interval of the mean is known, and 95 % of many hold the true mean."""
    rng = np.random.default_rng(3)
    truth, spread, count, held = 4.0, 0.8, 200, 0
    for _ in range(200):
        low, high = score(rng.normal(truth, spread, count)).interval() or (0.0, 0.0)
        held += low <= np.exp(truth / 2) <= high
        width = 2 * 1.96 * spread / 2 / np.sqrt(count)
        assert np.log(high / low) == pytest.approx(width, rel=0.25)
    assert 180 <= held <= 198  # 95 % of 200 is 190, with a standard deviation of 3


def test_differences_are_paired() -> None:
    """What both share does not widen the interval of their difference."""
    a = np.random.default_rng(4).gamma(3.0, 1.5, 50)
    low, high = score(a).interval() or (0.0, 0.0)
    found, interval = difference(score(a * 1.001), score(a))
    assert interval is not None
    assert 0 < interval[0] < found < interval[1]
    assert interval[1] - interval[0] < (high - low) / 100


def test_one_window_has_no_interval() -> None:
    one = score(np.array([3.0]))
    assert one.perplexity == pytest.approx(np.exp(1.5))
    assert one.interval() is None
    assert difference(one, one) == (0.0, None)


@given(st.lists(st.floats(0, 30), min_size=2, max_size=30), st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_what_holds_for_any_two_scores(sums: list[float], seed: int) -> None:
    a, b = score(np.array(sums), seed), score(np.array(sums[::-1]), seed + 1)
    interval = a.interval()
    assert interval is not None
    slack = 1 + 1e-12
    assert np.exp(min(sums) / 2) <= interval[0] * slack
    assert interval[0] <= interval[1] <= np.exp(max(sums) / 2) * slack
    assert interval == a.interval()
    assert agreement(a, a) == 1
    assert 0 <= agreement(a, b) == agreement(b, a) <= 1
    (ab, ab_interval), (ba, ba_interval) = difference(a, b), difference(b, a)
    assert ab == -ba
    assert ab_interval is not None
    assert ba_interval is not None
    assert ab_interval == pytest.approx((-ba_interval[1], -ba_interval[0]))
    assert difference(a, a) == (0.0, (0.0, 0.0))


def test_agreement_is_counted() -> None:
    cut = np.zeros((2, 3), np.int64)
    a = Score(cut, np.ones(2), np.array([[1, 2], [3, 4]], np.int32))
    b = Score(cut, np.ones(2), np.array([[1, 0], [3, 4]], np.int32))
    assert agreement(a, b) == 0.75
    assert a.top1_accuracy == 0
    assert b.top1_accuracy == 0.25


def test_only_the_same_windows_compare() -> None:
    a = score(np.ones(3))
    other = dataclasses.replace(a, windows=a.windows + 1)
    for compare in (agreement, difference):
        with pytest.raises(AssertionError, match="same windows"):
            compare(a, other)
