import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edge_rt
from edge_rt.bundle import (
    Bundle,
    ModelInfo,
    QuantizationSummary,
    Tolerance,
    write_manifest,
)
from edge_rt.errors import BundleError, ConfigError
from edge_rt.recipes import EngineRecipe, OrtOptions

MODEL = ModelInfo("gptj", 2, 4, 16, vocab_size=300, n_positions=64, eos_token_id=299)
RECIPE = EngineRecipe("ort", max_batch=4, max_context=32, ort=OrtOptions(accuracy_level=0))
QUANTIZATION = QuantizationSummary("int4-salient", "rtn", 4, 128, 0.01, "ab" * 32)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "model.onnx").write_bytes(b"graph")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_bytes(b"{}")
    write_manifest(
        tmp_path,
        model=MODEL,
        recipe=RECIPE,
        quantization=QUANTIZATION,
        libraries={"onnxruntime": "1.23.2"},
        tolerance=Tolerance(max_abs_logit_diff=0.5, mean_kl=1e-3),
    )
    return tmp_path


def edit(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    table = json.loads((bundle / "manifest.json").read_text())
    change(table)
    (bundle / "manifest.json").write_text(json.dumps(table))


def test_what_is_written_is_loaded(bundle: Path) -> None:
    manifest = Bundle.load(bundle).manifest
    assert manifest.model == MODEL
    assert manifest.recipe == RECIPE
    assert manifest.quantization == QUANTIZATION
    assert manifest.tolerance == Tolerance(0.5, 1e-3)
    assert manifest.edge_rt_version == edge_rt.__version__
    assert manifest.files.keys() == {"model.onnx", "tokenizer/tokenizer.json"}
    assert manifest.files["model.onnx"].size_bytes == 5


def test_writing_again_does_not_list_the_manifest(bundle: Path) -> None:
    manifest = write_manifest(
        bundle,
        model=MODEL,
        recipe=RECIPE,
        quantization=QUANTIZATION,
        libraries={},
        tolerance=Tolerance(0.5, 1e-3),
    )
    assert "manifest.json" not in manifest.files
    assert Bundle.load(bundle).manifest == manifest


def test_limits_of_one_buffer_per_request(bundle: Path) -> None:
    limits = Bundle.load(bundle).manifest.limits()
    assert limits.max_requests == limits.max_rows == limits.pages == 4
    assert limits.page_tokens == limits.max_context == 32
    assert limits.vocab_size == 300
    assert limits.prefill_chunk == RECIPE.prefill_chunk
    assert limits.max_tokens_per_step == RECIPE.max_tokens_per_step


def test_context_is_the_models_unless_the_recipe_says(bundle: Path) -> None:
    manifest = Bundle.load(bundle).manifest
    unlimited = replace(manifest, recipe=replace(RECIPE, max_context=None))
    assert unlimited.limits().max_context == MODEL.n_positions


def test_context_beyond_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_context is 65.* 64 tokens"):
        write_manifest(
            tmp_path,
            model=MODEL,
            recipe=replace(RECIPE, max_context=65),
            quantization=QUANTIZATION,
            libraries={},
            tolerance=Tolerance(0.5, 1e-3),
        )
    assert not (tmp_path / "manifest.json").exists()


def test_intact_files_pass(bundle: Path) -> None:
    Bundle.load(bundle).check_files()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"model\.onnx is missing"),
        (b"gra", r"model\.onnx has 3 bytes, expected 5"),
        (b"grbph", r"model\.onnx was altered"),
    ],
)
def test_damaged_file_is_named(bundle: Path, content: bytes | None, message: str) -> None:
    if content is None:
        (bundle / "model.onnx").unlink()
    else:
        (bundle / "model.onnx").write_bytes(content)
    loaded = Bundle.load(bundle)
    with pytest.raises(BundleError, match=f"{message}.*rebuild"):
        loaded.check_files()


@pytest.mark.parametrize("installed", ["1.23.2", "1.24.0", "2.0", "1.23.10", "1.23.2+cpu"])
def test_library_as_new_passes(bundle: Path, installed: str) -> None:
    Bundle.load(bundle).check_libraries({"onnxruntime": installed, "other": "0.1"})


@pytest.mark.parametrize("installed", ["1.23.1", "1.22.9", "1.9.0", "0.99"])
def test_older_library_is_refused(bundle: Path, installed: str) -> None:
    with pytest.raises(
        BundleError, match=rf"onnxruntime 1\.23\.2 or newer, but {installed} is installed"
    ):
        Bundle.load(bundle).check_libraries({"onnxruntime": installed})


def test_absent_library_is_refused(bundle: Path) -> None:
    with pytest.raises(
        BundleError, match=r"needs onnxruntime 1\.23\.2 or newer, which is not installed"
    ):
        Bundle.load(bundle).check_libraries({})


def test_version_that_is_none_is_refused(bundle: Path) -> None:
    with pytest.raises(BundleError, match="'unknown' is not a version"):
        Bundle.load(bundle).check_libraries({"onnxruntime": "unknown"})


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"absent is no bundle: it is not a directory.*build"):
        Bundle.load(tmp_path / "absent")


def test_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"no bundle: it has no manifest\.json.*build"):
        Bundle.load(tmp_path)


def test_bad_json(bundle: Path) -> None:
    (bundle / "manifest.json").write_text("{")
    with pytest.raises(BundleError, match=r"manifest\.json is not valid JSON"):
        Bundle.load(bundle)


@pytest.mark.parametrize("version", [2, None, "1"])
def test_other_schema_version_is_refused_before_all_else(bundle: Path, version: object) -> None:
    edit(bundle, lambda table: table.update(schema_version=version, new_key=1))
    with pytest.raises(
        BundleError, match=f"schema version {version}, this edge_rt reads 1; rebuild.*edge-rt build"
    ):
        Bundle.load(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model"), "missing key 'model'"),
        (lambda t: t["model"].pop("n_head"), "model: missing key 'n_head'"),
        (lambda t: t.update(modle={}), "unknown key 'modle'; did you mean 'model'"),
        (lambda t: t["recipe"].update(engine="tpu"), "recipe: engine: 'tpu' is not one of"),
        (lambda t: t["recipe"].update(max_batch=99), "recipe: max_batch must be 1 to"),
        (lambda t: t["recipe"].update(max_context=99), "max_context is 99"),
        (lambda t: t["libraries"].update(x=1), "libraries: x: expected str"),
        (lambda t: t.update(files=[]), "files: expected a table"),
        (lambda t: t["files"]["model.onnx"].update(size_bytes="5"), "size_bytes: expected int"),
        (lambda t: t["tolerance"].update(mean_kl=float("nan")), "mean_kl: expected a finite"),
    ],
)
def test_manifest_fault_is_named(
    bundle: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit(bundle, change)
    with pytest.raises(BundleError, match=rf"manifest\.json.*{message}.*rebuild"):
        Bundle.load(bundle)


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/model.onnx", "a/../../b"])
def test_files_stay_inside(bundle: Path, name: str) -> None:
    edit(bundle, lambda table: table["files"].update({name: {"sha256": "", "size_bytes": 0}}))
    with pytest.raises(BundleError, match="outside the directory"):
        Bundle.load(bundle)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.update(tolerance=None),
        lambda table: table["recipe"].update(engine="null"),
        lambda table: table["model"].update(vocab_size=0),
        lambda table: table["model"].update(n_layer=-1),
    ],
    ids=["no tolerance", "another engine", "no vocabulary", "negative layers"],
)
def test_a_manifest_that_makes_no_sense(
    bundle: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    edit(bundle, change)
    with pytest.raises(BundleError, match="rebuild"):
        Bundle.load(bundle)
