from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_rt.build.bundle import build
from edge_rt.bundle import Bundle
from edge_rt.errors import CheckpointError, ConfigError

BundleFactory = Callable[[str], Path]


def test_manifest_of_an_ort_bundle(demo_bundle: BundleFactory) -> None:
    bundle = Bundle.load(demo_bundle("demo.cpu"))
    bundle.check_files()
    manifest = bundle.manifest
    assert set(manifest.files) == {
        "golden.safetensors",
        "model.onnx",
        "tokenizer.json",
        "weights.bin",
    }
    assert (manifest.model.n_layer, manifest.model.head_size) == (4, 64)
    assert manifest.quantization.fp16_fraction == pytest.approx(4 / 384)
    assert manifest.libraries == {"onnxruntime": "1.23.2"}
    assert manifest.limits().max_requests == 8
    assert manifest.limits().max_context == 512


def test_a_null_bundle_holds_no_weights(demo_bundle: BundleFactory) -> None:
    bundle = Bundle.load(demo_bundle("demo.null"))
    assert set(bundle.manifest.files) == {"tokenizer.json"}
    assert bundle.manifest.tolerance is None


def test_context_is_the_models_where_the_recipe_has_none(
    demo_quantized: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.toml").write_text('engine = "null"\n')
    manifest = build(demo_quantized, str(tmp_path / "own.toml"), tmp_path / "b")
    assert manifest.limits().max_context == 512


def test_context_beyond_the_models_is_refused(demo_quantized: Path, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('engine = "null"\nmax_context = 513\n')
    with pytest.raises(ConfigError, match="trained for 512 tokens"):
        build(demo_quantized, str(tmp_path / "own.toml"), tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "damage",
    [
        "decoder.onnx",
        "golden.safetensors",
        "layer.002.safetensors",
        "outer.safetensors",
        "tokenizer.json",
    ],
)
@pytest.mark.parametrize("altered", [False, True], ids=["missing", "altered"])
def test_a_damaged_checkpoint_leaves_the_old_bundle(
    demo_quantized: Path, demo_bundle: BundleFactory, tmp_path: Path, damage: str, altered: bool
) -> None:
    quantized, out = tmp_path / "q", tmp_path / "b"
    shutil.copytree(demo_quantized, quantized)
    shutil.copytree(demo_bundle("demo.cpu"), out)
    content = bytearray((quantized / damage).read_bytes())
    content[len(content) // 2] ^= 1
    (quantized / damage).unlink()
    if altered:
        (quantized / damage).write_bytes(content)
    manifest = (out / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match=damage.replace(".", r"\.")):
        build(quantized, "demo.cpu", out)
    assert (out / "manifest.json").read_bytes() == manifest
    Bundle.load(out).check_files()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("damage", ["decoder.onnx", "layer.002.safetensors"])
def test_a_truncated_checkpoint_is_refused(
    demo_quantized: Path, tmp_path: Path, damage: str
) -> None:
    quantized = tmp_path / "q"
    shutil.copytree(demo_quantized, quantized)
    content = (quantized / damage).read_bytes()
    (quantized / damage).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=damage.replace(".", r"\.")):
        build(quantized, "demo.cpu", tmp_path / "b")
