from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from fakes.checks import transformers_logits
from onnx.external_data_helper import ExternalDataInfo

from edge_rt.build.bundle import build
from edge_rt.bundle import Bundle, Tolerance
from edge_rt.core import DecodeRow, Limits, PageCopy, PrefillChunk, SampledToken
from edge_rt.errors import BundleError, ConfigError, EngineError
from edge_rt.golden import GOLDEN_FILE, Golden, GoldenPrompt
from edge_rt.runtime.base import Runner, Sampled
from edge_rt.runtime.engines import open_engine
from edge_rt.runtime.selfcheck import compare, forced_logits, report

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
        if not chunk.draws:
            return Sampled(())
        return self._answer()

    def decode(self, rows: Sequence[DecodeRow], *, want_logits: bool = False) -> Sampled:
        (row,) = rows
        assert row.position == len(self.seen)
        self.seen.append(row.token)
        self.calls.append(1)
        return self._answer()

    def copy(self, copies: Sequence[PageCopy]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def _answer(self) -> Sampled:
        logits = expected(self.seen) + np.float32(self.error)
        return Sampled((SampledToken(int(logits.argmax())),), logits[None])


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


class Altered:
    """The real engine with `change` between it and whoever asks."""

    def __init__(self, inner: Runner, change: Callable[[np.ndarray], np.ndarray]) -> None:
        self.inner = inner
        self.limits = inner.limits
        self.change = change

    def prefill(self, chunks: Sequence[PrefillChunk], *, want_logits: bool = False) -> Sampled:
        return self._altered(self.inner.prefill(chunks, want_logits=want_logits))

    def decode(self, rows: Sequence[DecodeRow], *, want_logits: bool = False) -> Sampled:
        return self._altered(self.inner.decode(rows, want_logits=want_logits))

    def copy(self, copies: Sequence[PageCopy]) -> None:
        self.inner.copy(copies)

    def close(self) -> None:
        self.inner.close()

    def _altered(self, sampled: Sampled) -> Sampled:
        if sampled.logits is None:
            return sampled
        return Sampled(sampled.tokens, self.change(sampled.logits))


def one(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(logits: np.ndarray) -> np.ndarray:
        logits[0, 17] = value
        return logits

    return change


def noise(size: float) -> Callable[[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    return lambda logits: logits + rng.normal(scale=size, size=logits.shape).astype(np.float32)


@pytest.mark.parametrize(
    ("recipe", "change"),
    [
        ("demo.cpu-exact", noise(1e-3)),
        ("demo.cpu", noise(0.3)),
        ("demo.cpu", one(float("nan"))),
        ("demo.cpu", one(float("inf"))),
        ("demo.cpu", lambda logits: np.roll(logits, 1, axis=-1)),
        ("demo.cpu", np.zeros_like),
    ],
    ids=["small noise", "noise", "one NaN", "one infinity", "shifted vocabulary", "zeros"],
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_an_engine_that_is_off_is_found(
    demo_bundle: Callable[[str], Path], recipe: str, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    bundle = Bundle.load(demo_bundle(recipe))
    golden = Golden.load(bundle.path / GOLDEN_FILE)
    assert bundle.manifest.tolerance is not None
    runner = Altered(open_engine(bundle), change)
    found = compare(runner, golden)
    runner.close()
    with pytest.raises(EngineError, match="golden logits differ"):
        found.check(bundle.manifest.tolerance)


# demo.cpu's tolerance leaves room for int8 activations, and shifted scales fit into that room:
# for them only demo.cpu-exact is held to account.
@pytest.mark.parametrize(
    ("recipe", "tensor"),
    [
        ("demo.cpu", "h.1.attn_qkv+h.1.mlp_fc_in.levels"),
        ("demo.cpu-exact", "h.1.attn_qkv+h.1.mlp_fc_in.levels"),
        ("demo.cpu-exact", "h.2.branches.scales"),
    ],
)
def test_damage_that_the_manifest_hides_is_found(
    demo_bundle: Callable[[str], Path], tmp_path: Path, recipe: str, tensor: str
) -> None:
    """Weights rewritten before they were hashed, as a faulty build would: only logits can tell."""
    path = tmp_path / "bundle"
    shutil.copytree(demo_bundle(recipe), path)
    model = onnx.load(str(path / "model.onnx"), load_external_data=False)
    (where,) = [
        ExternalDataInfo(stored) for stored in model.graph.initializer if stored.name == tensor
    ]
    with (path / "weights.bin").open("r+b") as file:
        file.seek(where.offset)
        part = np.frombuffer(file.read(where.length), np.uint8).reshape(-1, 4)
        file.seek(where.offset)
        file.write(np.roll(part, 1, axis=0).tobytes())  # every value is there, one place off
    bundle = Bundle.load(path)
    runner = open_engine(bundle)
    found = compare(runner, Golden.load(path / GOLDEN_FILE))
    runner.close()
    assert bundle.manifest.tolerance is not None
    with pytest.raises(EngineError, match="golden logits differ"):
        found.check(bundle.manifest.tolerance)


def test_altered_golden_logits(demo_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    shutil.copytree(demo_bundle("demo.cpu-exact"), path)
    golden = Golden.load(path / GOLDEN_FILE)
    golden.prompts[3].logits[-1, 100] += 0.01
    Golden.save(path / GOLDEN_FILE, golden.prompts)
    bundle = Bundle.load(path)
    with pytest.raises(BundleError, match=r"golden\.safetensors was altered"):
        bundle.check_files()
    runner = open_engine(bundle)
    found = compare(runner, Golden.load(path / GOLDEN_FILE))
    runner.close()
    assert bundle.manifest.tolerance is not None
    with pytest.raises(EngineError, match=r"max_abs_logit_diff is 0\.01"):
        found.check(bundle.manifest.tolerance)


def test_a_bundle_too_short_for_the_golden_prompts(demo_quantized: Path, tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text('engine = "ort"\nmax_context = 31\n')
    with pytest.raises(ConfigError, match=r"max_context is 31, .* have 32 tokens"):
        build(demo_quantized, str(tmp_path / "short.toml"), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_the_demo_engines(demo_bundle: Callable[[str], Path]) -> None:
    for recipe, bound in (("demo.cpu", 1e-2), ("demo.cpu-exact", 1e-6)):
        bundle = Bundle.load(demo_bundle(recipe))
        runner = open_engine(bundle)
        found = compare(runner, Golden.load(bundle.path / GOLDEN_FILE))
        runner.close()
        assert found.mean_kl < bound
        assert bundle.manifest.tolerance is not None
        found.check(bundle.manifest.tolerance)


def test_forced_logits_are_those_of_the_checkpoint(
    demo_checkpoint: Path, demo_bundle: Callable[[str], Path]
) -> None:
    """Up to what INT4 costs: of neighbouring positions, the right one is nearest."""
    engine = open_engine(Bundle.load(demo_bundle("demo.cpu")))
    tokens = [*range(1, 80), 11, 12, 13, 14]
    found = forced_logits(engine, tokens, start=78)
    exact = transformers_logits(demo_checkpoint, np.array([tokens]))[0]
    distance = np.abs(found[:, None] - exact[None]).mean(-1)
    assert distance.argmin(1).tolist() == [78, 79, 80, 81, 82]
