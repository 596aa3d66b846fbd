"""What several rooms' tests need: the demo checkpoint, its quantized form and its bundles."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GPTJConfig, GPTJForCausalLM

from edge_rt.build.bundle import build
from edge_rt.quant.pipeline import quantize
from edge_rt.recipes import data_dir

SMALL_RECIPE = """\
method = "{method}"
awq = {awq}
group_size = {group_size}
outlier_fraction = 0.01

[calibration]
text = "{text}"
sequences = 8
tokens = 128
"""


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    path = data_dir("engines") / "demo"
    if not (path / "model.safetensors").is_file():
        pytest.fail(f"{path} has no model.safetensors: tools/train_demo.py makes it", pytrace=False)
    return path


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As int4, with less calibration text."""
    path = tmp_path_factory.mktemp("recipe") / "small.toml"
    text = data_dir("calib") / "calibration.txt"
    path.write_text(SMALL_RECIPE.format(method="gptq", awq="true", group_size=128, text=text))
    return path


@pytest.fixture(scope="session")
def demo_quantized(
    demo_checkpoint: Path, small_recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("demo") / "quantized"
    quantize(demo_checkpoint, out, str(small_recipe))
    return out


@pytest.fixture(scope="session")
def demo_bundle(
    demo_quantized: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The demo's bundle for an engine recipe, built once a session; not to be written to."""
    made: dict[str, Path] = {}

    def bundle(recipe: str) -> Path:
        if recipe not in made:
            made[recipe] = tmp_path_factory.mktemp("bundle") / recipe
            build(demo_quantized, recipe, made[recipe])
        return made[recipe]

    return bundle


@pytest.fixture(scope="session")
def random_gptj(
    demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """A Hugging Face directory of two random layers, for any sizes, with the demo's tokenizer."""

    def make(n_embd: int, n_head: int, rotary_dim: int, n_inner: int | None = None) -> Path:
        torch.manual_seed(n_embd + n_head + rotary_dim)
        config = GPTJConfig(
            vocab_size=3072,
            n_positions=64,
            n_embd=n_embd,
            n_layer=2,
            n_head=n_head,
            n_inner=n_inner,
            rotary_dim=rotary_dim,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = GPTJForCausalLM(config)
        with torch.no_grad():
            for weight in model.parameters():
                # The library's start: tiny weights, zero biases. Here everything must count.
                weight.add_(torch.randn_like(weight) * (0.1 if weight.dim() == 1 else 0.05))
        path = tmp_path_factory.mktemp("random") / "checkpoint"
        model.save_pretrained(path)
        shutil.copy(demo_checkpoint / "tokenizer.json", path)
        return path

    return make


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., str]:
    """A small quantization recipe's file."""

    def make(method: str = "rtn", group_size: int = 32, awq: str = "false") -> str:
        path = tmp_path / f"{method}-{group_size}.toml"
        text = data_dir("calib") / "calibration.txt"
        content = SMALL_RECIPE.format(method=method, awq=awq, group_size=group_size, text=text)
        path.write_text(content.replace("tokens = 128", "tokens = 32"))
        return str(path)

    return make
