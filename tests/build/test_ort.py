"""The ONNX Runtime model against transformers and the dequantized reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes.checks import engine_logits, greedy, transformers_logits
from fakes.quantized import reference_logits
from safetensors.numpy import load_file, save_file

from edge_rt.bench.workloads import held_out_prompts
from edge_rt.build import ort
from edge_rt.bundle import Bundle
from edge_rt.core import Limits
from edge_rt.errors import ConfigError
from edge_rt.loop import Loop
from edge_rt.quant.pipeline import quantize
from edge_rt.quant.store import QuantizedCheckpoint
from edge_rt.recipes import OrtOptions
from edge_rt.runtime.engines import open_engine
from edge_rt.runtime.ort import OrtRunner
from edge_rt.runtime.selfcheck import forced_logits, report
from edge_rt.tokenizer import Tokenizer

BundleFactory = Callable[[str], Path]
EXACT = OrtOptions(accuracy_level=0)
NEAR_TIE = 2e-4  # twice what two float32 ways to one logit may lie apart
# Heads of 32 to 256. 12 and 24 are rotary sizes that GroupQueryAttention does not take; 40 is a
# head size that it does not rotate.
SIZES = [(64, 2, 16), (128, 4, 12), (160, 4, 24), (120, 3, 16), (256, 2, 64), (256, 1, 256)]
LIMITS = Limits(
    max_requests=4,
    max_rows=4,
    max_tokens_per_step=64,
    prefill_chunk=16,
    pages=4,
    page_tokens=64,
    max_context=64,
    vocab_size=3072,
)


def open_model(quantized: Path, out: Path, options: OrtOptions) -> OrtRunner:
    out.mkdir()
    ort.write_model(quantized, out, options)
    return OrtRunner(out / ort.MODEL_FILE, LIMITS, options)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_float_graph_equals_transformers(
    random_gptj: Callable[..., Path],
    recipe: Callable[..., str],
    tmp_path: Path,
    sizes: tuple[int, int, int],
) -> None:
    checkpoint = random_gptj(*sizes)
    quantize(checkpoint, tmp_path / "q", recipe("float"))
    tokens = np.random.default_rng(2).integers(0, 3072, (2, 29))
    found = engine_logits(open_model(tmp_path / "q", tmp_path / "b", EXACT), tokens, 17)
    expected = transformers_logits(checkpoint, tokens)[:, 16:]
    assert np.abs(found - expected).max() <= 1e-4


def test_float_graph_of_the_demo_equals_transformers(
    demo_checkpoint: Path, recipe: Callable[..., str], tmp_path: Path
) -> None:
    quantize(demo_checkpoint, tmp_path / "q", recipe("float"))
    prompts = held_out_prompts(Tokenizer.load(demo_checkpoint), 2, 45)
    tokens = np.array(prompts, np.int64)
    found = engine_logits(open_model(tmp_path / "q", tmp_path / "b", EXACT), tokens, 33)
    expected = transformers_logits(demo_checkpoint, tokens)[:, 32:]
    assert np.abs(found - expected).max() <= 1e-4


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_int4_with_float_activations_equals_the_dequantized_reference(
    demo_quantized: Path, tmp_path: Path, block_size: int
) -> None:
    options = replace(EXACT, block_size=block_size)
    tokens = np.array(held_out_prompts(Tokenizer.load(demo_quantized), 2, 45), np.int64)
    expected = reference_logits(QuantizedCheckpoint.open(demo_quantized), tokens)[:, 32:]
    found = engine_logits(open_model(demo_quantized, tmp_path / "b", options), tokens, 33)
    assert np.abs(found - expected).max() <= 1e-4


@pytest.mark.parametrize("awq", ["false", "true"])
@pytest.mark.parametrize("sizes", [(80, 2, 12), (176, 2, 16), (64, 2, 16)], ids=str)
def test_random_models_in_groups_of_64(
    random_gptj: Callable[..., Path],
    recipe: Callable[..., str],
    tmp_path: Path,
    sizes: tuple[int, int, int],
    awq: str,
) -> None:
    """Inputs that are no multiple of the group are not joined; AWQ scales what follows GELU."""
    quantize(random_gptj(*sizes), tmp_path / "q", recipe("rtn", 64, awq))
    tokens = np.random.default_rng(3).integers(0, 3072, (2, 20))
    expected = reference_logits(QuantizedCheckpoint.open(tmp_path / "q"), tokens)[:, 11:]
    found = engine_logits(open_model(tmp_path / "q", tmp_path / "b", EXACT), tokens, 12)
    assert np.abs(found - expected).max() <= 1e-4


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 17])
def test_one_row_alone_stays_close_to_the_reference(
    demo_quantized: Path, tmp_path: Path, block_size: int, tokens: int
) -> None:
    """A prompt's last chunk of one token is a product of one row: kernels of its own."""
    options = OrtOptions(block_size=block_size)  # type: ignore[arg-type]
    engine = open_model(demo_quantized, tmp_path / "b", options)
    prompts = np.array(held_out_prompts(Tokenizer.load(demo_quantized), 8, tokens), np.int64)
    expected = reference_logits(QuantizedCheckpoint.open(demo_quantized), prompts)[:, -1]
    found = np.concatenate([forced_logits(engine, row.tolist(), tokens - 1) for row in prompts])
    assert report(expected, found).mean_kl <= 5e-3


def continued(bundle: Bundle) -> np.ndarray:
    """50 held-out prompts of 24 tokens, each with the engine's own next 16."""
    prompts = held_out_prompts(Tokenizer.load(bundle.path), 50, 24)
    loop = Loop(open_engine(bundle))
    answers = greedy(loop, prompts, max_tokens=16)
    loop.close()
    return np.array([[*p, *a] for p, a in zip(prompts, answers, strict=True)], np.int64)


def test_exact_engine_and_reference_say_the_same_on_50_prompts(
    demo_bundle: BundleFactory, demo_quantized: Path, record_property: Callable[..., None]
) -> None:
    whole = continued(Bundle.load(demo_bundle("demo.cpu-exact")))
    # Over the engine's own tokens: where each agrees with the reference, all of them do.
    reference = reference_logits(QuantizedCheckpoint.open(demo_quantized), whole[:, :-1])[:, 23:]
    chosen = np.take_along_axis(reference, whole[:, 24:, None], -1)[..., 0]
    best = np.sort(reference, -1)[..., -2:]
    near_ties = best[..., 1] - best[..., 0] <= NEAR_TIE
    record_property("near_ties", int(near_ties.sum()))
    record_property("differing_tokens", int((chosen != best[..., 1]).sum()))
    assert near_ties.mean() <= 0.01
    differs = np.argwhere((chosen != best[..., 1]) & ~near_ties)
    assert differs.tolist() == [], "(prompt, token) where the engine chose another token"
    # At a near-tie rounding may decide, but only between the two.
    assert (chosen >= best[..., 0]).all()


def test_int8_activations_keep_95_of_100_greedy_tokens(
    demo_bundle: BundleFactory, demo_quantized: Path, record_property: Callable[..., None]
) -> None:
    whole = continued(Bundle.load(demo_bundle("demo.cpu")))
    reference = reference_logits(QuantizedCheckpoint.open(demo_quantized), whole[:, :-1])[:, 23:]
    agreement = (reference.argmax(-1) == whole[:, 24:]).mean()
    record_property("greedy_agreement", float(agreement))
    assert agreement >= 0.95


def test_int8_activations_stay_close_to_the_reference(
    demo_bundle: BundleFactory, demo_quantized: Path, record_property: Callable[..., None]
) -> None:
    bundle = Bundle.load(demo_bundle("demo.cpu"))
    tokens = np.array(held_out_prompts(Tokenizer.load(bundle.path), 4, 120), np.int64)
    expected = reference_logits(QuantizedCheckpoint.open(demo_quantized), tokens)[:, 19:]
    found = engine_logits(open_engine(bundle), tokens, 20)
    figures = report(expected.reshape(-1, 3072), found.reshape(-1, 3072))
    record_property("top1_agreement", figures.top1_agreement)
    record_property("mean_kl", figures.mean_kl)
    assert figures.top1_agreement >= 0.95
    assert figures.mean_kl <= 1e-3  # measured: 1.7e-4


def test_an_outlier_channel_does_not_stretch_its_block_under_int8_activations(
    random_gptj: Callable[..., Path],
    recipe: Callable[..., str],
    tmp_path: Path,
    record_property: Callable[..., None],
) -> None:
    """The demo has no such channel: there, leaving it in the INT4 product changes nothing."""
    path = random_gptj(64, 2, 16)
    tensors = load_file(path / "model.safetensors")
    for layer in range(2):
        block = f"transformer.h.{layer}."
        for part in ("ln_1.weight", "ln_1.bias"):
            tensors[block + part][5] *= 100
        for part in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc_in"):
            tensors[f"{block}{part}.weight"][:, 5] /= 100
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    quantize(path, tmp_path / "q", recipe("rtn", 32))
    tokens = np.random.default_rng(4).integers(0, 3072, (2, 29))
    expected = reference_logits(QuantizedCheckpoint.open(tmp_path / "q"), tokens)[:, 16:]
    options = OrtOptions(head_bits=16)
    found = engine_logits(open_model(tmp_path / "q", tmp_path / "b", options), tokens, 17)
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    record_property("relative_error", error)
    assert error <= 0.03  # measured: 0.009; 0.149 where the channel is not zeroed


def test_heads_that_the_engine_cannot_take(
    random_gptj: Callable[..., Path], recipe: Callable[..., str], tmp_path: Path
) -> None:
    quantize(random_gptj(88, 2, 16), tmp_path / "q", recipe("float"))
    with pytest.raises(ConfigError, match="multiple of 8, this checkpoint's heads have 44"):
        open_model(tmp_path / "q", tmp_path / "b", EXACT)


def test_block_that_does_not_divide_the_group(
    random_gptj: Callable[..., Path], recipe: Callable[..., str], tmp_path: Path
) -> None:
    quantize(random_gptj(64, 2, 16), tmp_path / "q", recipe("rtn", 32))
    with pytest.raises(ConfigError, match=r"block_size 64 does not divide .* group size 32"):
        open_model(tmp_path / "q", tmp_path / "b", OrtOptions(block_size=64))
