"""What is written is what is read back; damage is named."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes.quantized import quantize_rtn
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_rt.bundle import QuantizationSummary
from edge_rt.errors import CheckpointError
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.gptj import LINEARS, Head, Layer, Linear, ModelConfig
from edge_rt.quant import store
from edge_rt.quant.layer import QuantizedLayer
from edge_rt.quant.pipeline import quantize
from edge_rt.quant.report import LinearReport
from edge_rt.quant.store import QuantInfo, QuantizedCheckpoint
from edge_rt.recipes import QuantRecipe

CONFIG = ModelConfig(
    n_embd=24,
    n_layer=1,
    n_head=2,
    n_inner=40,
    rotary_dim=4,
    vocab_size=9,
    n_positions=8,
    layer_norm_epsilon=1e-5,
    tie_word_embeddings=False,
    eos_token_id=None,
)


def checkpoint(directory: Path) -> QuantizedCheckpoint:
    summary = QuantizationSummary("own", "rtn", 4, 32, 0.01, None)
    return QuantizedCheckpoint(directory, QuantInfo(CONFIG, QuantRecipe(), summary, "0", [], {}))


def random_layer() -> Layer:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    shapes = {"attn_qkv": (72, 24), "mlp_fc_in": (40, 24), "attn_out": (24, 24)}
    shapes["mlp_fc_out"] = (24, 40)
    linears = {
        spec.name: Linear(
            normal(*shapes[spec.name]), normal(shapes[spec.name][0]) if spec.bias else None
        )
        for spec in LINEARS
    }
    return Layer(normal(24), normal(24), linears)


def test_a_layer_comes_back_quantized_where_it_was_quantized(tmp_path: Path) -> None:
    layer = random_layer()
    salient = np.array([1, 23], np.int32)
    post_scale = np.linspace(0.5, 2, 40, dtype=np.float32)
    fc_in = layer.linears["mlp_fc_in"]
    quantized = replace(quantize_rtn(fc_in.weight, salient, 32, fc_in.bias), post_scale=post_scale)
    report = LinearReport("mlp_fc_in", {"rtn": 0.25}, 0.1, None, [1, 23], 3.5)
    made = QuantizedLayer(layer, {"mlp_fc_in": quantized}, [report])
    store.save_layer(tmp_path, 0, made)
    assert store.load_layer(tmp_path, 0, CONFIG).reports == [report]
    found = checkpoint(tmp_path).layer(0)
    np.testing.assert_array_equal(found.ln_weight, layer.ln_weight)
    np.testing.assert_array_equal(found.ln_bias, layer.ln_bias)
    for name, linear in found.linears.items():
        expected = layer.linears[name]
        if name == "mlp_fc_in":
            expected = Linear(quantized.dequantize(24), fc_in.bias, post_scale)
        for part in ("weight", "bias", "post_scale"):
            np.testing.assert_array_equal(getattr(linear, part), getattr(expected, part))


def test_what_lies_outside_the_layers_comes_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    head = Head(*(rng.normal(size=n).astype(np.float32) for n in (24, 24, (9, 24), 9)))
    embedding = rng.normal(size=(9, 24)).astype(np.float16)
    half = head.weight.astype(np.float16)
    store.save_outer(tmp_path, embedding, head, half, CONFIG)
    found = checkpoint(tmp_path)
    np.testing.assert_array_equal(found.embedding(), embedding.astype(np.float32))
    again = found.head()
    np.testing.assert_array_equal(again.weight, half.astype(np.float32))
    for part in ("ln_weight", "ln_bias", "bias"):
        np.testing.assert_array_equal(getattr(again, part), getattr(head, part))
    assert again.weight.dtype == found.embedding().dtype == np.float32


@given(hnp.arrays(np.float32, 3, elements=st.floats(width=16, allow_nan=False)))
def test_lossless_halves_what_fp16_holds(x: np.ndarray) -> None:
    stored = store.lossless(x)
    assert stored.dtype == np.float16
    np.testing.assert_array_equal(stored.astype(np.float32), x)


@pytest.mark.parametrize("value", [1.0001, 65520.0, 1e-9, -70000.0])
def test_lossless_keeps_what_fp16_does_not(value: float) -> None:
    x = np.array([1.0, value], np.float32)
    stored = store.lossless(x)
    assert stored.dtype == np.float32
    np.testing.assert_array_equal(stored, x)


def test_a_float_recipe_comes_back_to_the_bit(
    random_gptj: Callable[..., Path], recipe: Callable[..., str], tmp_path: Path
) -> None:
    source = random_gptj(64, 2, 16)
    quantize(source, tmp_path / "q", recipe("float"))
    original, found = Checkpoint.open(source), QuantizedCheckpoint.open(tmp_path / "q")
    np.testing.assert_array_equal(found.embedding(), original.tensor("transformer.wte.weight"))
    np.testing.assert_array_equal(found.head().weight, original.tensor("lm_head.weight"))
    for index in range(2):
        tensors, layer = original.layer(index), found.layer(index)
        for spec in LINEARS:
            weight = np.concatenate([tensors[name] for name in spec.tensors])
            np.testing.assert_array_equal(layer.linears[spec.name].weight, weight)


def test_a_service_may_read_every_file(demo_quantized: Path) -> None:
    info = QuantizedCheckpoint.open(demo_quantized).info
    names = {path.name for path in demo_quantized.iterdir()}
    assert names == {*info.files, "quant.json"}
    for name in names:
        assert (demo_quantized / name).stat().st_mode & stat.S_IROTH, name


@pytest.mark.parametrize("file", ["layer.001.safetensors", "outer.safetensors"])
def test_a_file_that_cannot_be_read_is_named(
    demo_quantized: Path, tmp_path: Path, file: str
) -> None:
    damaged = tmp_path / "q"
    shutil.copytree(demo_quantized, damaged)
    (damaged / file).write_bytes((damaged / file).read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        QuantizedCheckpoint.open(damaged).layer(1)


def test_one_altered_byte_is_found(demo_quantized: Path, tmp_path: Path) -> None:
    for name in QuantizedCheckpoint.open(demo_quantized).info.files:
        damaged = tmp_path / name
        shutil.copytree(demo_quantized, damaged)
        content = bytearray((damaged / name).read_bytes())
        content[-1] ^= 1
        (damaged / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{name} was altered"):
            QuantizedCheckpoint.open(damaged).check_files()
        shutil.rmtree(damaged)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("n_embd", 128, r"describes wte.weight as \[3072, 128\], but outer.safetensors holds"),
        ("vocab_size", 99, r"describes wte.weight as \[99, "),
        ("rotary_dim", 8, r"describes rotary.cos"),
        ("n_layer", 9, "describes 9 layers, but lists files of"),
    ],
)
def test_sizes_that_are_not_the_files_are_refused(
    demo_quantized: Path, tmp_path: Path, key: str, value: int, says: str
) -> None:
    shutil.copytree(demo_quantized, tmp_path / "q")
    path = tmp_path / "q" / "quant.json"
    table = json.loads(path.read_text())
    table["model"][key] = value
    path.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=says):
        QuantizedCheckpoint.open(tmp_path / "q")
