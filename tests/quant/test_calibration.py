from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPTJForCausalLM

from edge_rt.errors import CheckpointError, ConfigError
from edge_rt.model import gptj
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.quant.calibration import observe_layer, sample_sequences


def test_windows_are_spread_without_overlap() -> None:
    windows = sample_sequences(np.arange(1000), sequences=4, length=100)
    assert windows[:, 0].tolist() == [0, 300, 600, 900]
    assert windows.shape == (4, 100)


def test_fewer_windows_where_the_text_is_short() -> None:
    assert sample_sequences(np.arange(250), sequences=64, length=100).shape == (2, 100)


@pytest.mark.parametrize("tokens", [0, 1, 99])
def test_too_little_text_is_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"has {tokens} tokens, less than one sequence of 100"):
        sample_sequences(np.arange(tokens), sequences=1, length=100)


def test_means_are_those_of_transformers(demo_checkpoint: Path) -> None:
    """Over more sequences than one batch holds, for the second layer too."""
    tokens = np.random.default_rng(0).integers(1, 3072, (40, 48))
    model = GPTJForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32).eval()
    seen: dict[tuple[int, str], np.ndarray] = {}
    modules = {"ln_1": "attn.q_proj", "attention": "attn.out_proj", "gelu": "mlp.fc_out"}

    def watch(layer: int, reads: str) -> None:
        def hook(_module: object, inputs: tuple[torch.Tensor, ...]) -> None:
            seen[layer, reads] = inputs[0].abs().mean((0, 1)).numpy()

        block = model.transformer.h[layer]
        block.get_submodule(modules[reads]).register_forward_pre_hook(hook)

    for layer in (0, 1):
        for reads in modules:
            watch(layer, reads)
    with torch.no_grad():
        model(torch.from_numpy(tokens))

    checkpoint = Checkpoint.open(demo_checkpoint)
    hidden = checkpoint.tensor("transformer.wte.weight")[tokens]
    for layer in (0, 1):
        floats = gptj.layer_from_tensors(checkpoint.layer(layer))
        hidden, means = observe_layer(hidden, floats, checkpoint.config)
        assert means.keys() == modules.keys()
        for reads, found in means.items():
            np.testing.assert_allclose(found.mean, seen[layer, reads], rtol=1e-4, atol=1e-6)


def test_activations_that_are_not_finite_are_refused(demo_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(demo_checkpoint)
    layer = gptj.layer_from_tensors(checkpoint.layer(0))
    hidden = np.zeros((1, 4, 384), np.float32)
    hidden[0, 2, 5] = np.nan
    with pytest.raises(CheckpointError, match="activations 'ln_1' are not finite"):
        observe_layer(hidden, layer, checkpoint.config)
