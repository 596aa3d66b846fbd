"""The NumPy reference against transformers' GPT-J in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.checks import F32, transformers_logits

from edge_rt.errors import CheckpointError
from edge_rt.model import gptj
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.quant.calibration import sample_sequences
from edge_rt.recipes import data_dir
from edge_rt.tokenizer import Tokenizer

# (n_embd, n_head, rotary_dim): heads of 32 to 256, rotary from a part to the whole of a head.
SIZES = [(64, 2, 16), (128, 4, 12), (160, 4, 24), (96, 3, 32), (256, 2, 64), (256, 1, 256)]
HF: dict[str, Any] = {
    "model_type": "gptj",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "rotary_dim": 16,
    "vocab_size": 100,
    "n_positions": 32,
}


def reference_logits(path: Path, tokens: np.ndarray) -> F32:
    checkpoint = Checkpoint.open(path)
    x = checkpoint.tensor("transformer.wte.weight")[tokens]
    for index in range(checkpoint.config.n_layer):
        x = gptj.forward_layer(
            x, gptj.layer_from_tensors(checkpoint.layer(index)), checkpoint.config
        )
    names = ("transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight", "lm_head.bias")
    return gptj.forward_head(x, gptj.Head(*map(checkpoint.tensor, names)), checkpoint.config)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("length", [1, 7, 64])
def test_random_models(
    random_gptj: Callable[..., Path], sizes: tuple[int, int, int], length: int
) -> None:
    path = random_gptj(*sizes)
    tokens = np.random.default_rng(length).integers(0, 3072, (2, length))
    assert np.abs(reference_logits(path, tokens) - transformers_logits(path, tokens)).max() <= 1e-4


def test_inner_width_of_its_own(random_gptj: Callable[..., Path]) -> None:
    path = random_gptj(64, 2, 16, n_inner=80)
    tokens = np.arange(12).reshape(1, 12)
    assert np.abs(reference_logits(path, tokens) - transformers_logits(path, tokens)).max() <= 1e-4


def test_demo_checkpoint_on_held_out_text(demo_checkpoint: Path) -> None:
    text = (data_dir("calib") / "heldout.txt").read_text(encoding="utf-8")[:100_000]
    ids = np.array(Tokenizer.load(demo_checkpoint).encode(text), np.int64)
    tokens = sample_sequences(ids, sequences=4, length=255)
    found = reference_logits(demo_checkpoint, tokens)
    assert np.abs(found - transformers_logits(demo_checkpoint, tokens)).max() <= 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"model_type": None}, "None"),
        ({"activation_function": "relu"}, "'relu'"),
        ({"n_embd": 63}, "not a multiple of n_head"),
        ({"n_positions": 10**12}, "n_positions 1000000000000 is more than 1048576"),
        ({"n_layer": 0}, "n_layer must be a positive integer"),
        ({"n_layer": True}, "n_layer must be a positive integer"),
        ({"vocab_size": "100"}, "vocab_size must be a positive integer"),
        ({"rotary_dim": 15}, "rotary_dim 15 must be even"),
        ({"rotary_dim": 34}, "at most the head size 32"),
        ({"rotary_dim": None}, "rotary_dim must be a positive integer"),
        ({"eos_token_id": [1, 2]}, "eos_token_id must be of type int"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be of type bool"),
        ({"layer_norm_epsilon": "tiny"}, "layer_norm_epsilon must be of type float"),
    ],
    ids=str,
)
def test_config_faults_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        gptj.ModelConfig.from_hf(HF | change)


def test_config_defaults() -> None:
    config = gptj.ModelConfig.from_hf(HF)
    assert (config.n_inner, config.eos_token_id, config.head_size) == (256, 50256, 32)
    assert gptj.ModelConfig.from_hf(HF | {"eos_token_id": None}).eos_token_id is None
