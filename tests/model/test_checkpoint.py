import json
import os
import re
import struct
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from edge_rt.errors import CheckpointError, MissingLibraryError
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.gptj import ModelConfig, layer_tensors, outer_tensors

Tensors = dict[str, npt.NDArray[Any]]

CONFIG = {
    "model_type": "gptj",
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "rotary_dim": 2,
    "vocab_size": 12,
    "n_positions": 16,
    "eos_token_id": 11,
}
Q_PROJ = "transformer.h.1.attn.q_proj.weight"


def gptj_tensors(table: Mapping[str, Any] = CONFIG) -> Tensors:
    rng = np.random.default_rng(0)
    config = ModelConfig.from_hf(table)
    shapes = outer_tensors(config) | {
        f"transformer.h.{i}.{name}": shape
        for i in range(config.n_layer)
        for name, shape in layer_tensors(config).items()
    }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_config(directory: Path, **changes: Any) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))


def write(directory: Path, tensors: Tensors, **changes: Any) -> Path:
    write_config(directory, **changes)
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_shards(directory: Path, tensors: Tensors) -> dict[str, str]:
    """Two safetensors shards and their index; returns the weight map."""
    write_config(directory)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / shard)
        weight_map |= dict.fromkeys(part, shard)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_holds(checkpoint: Checkpoint, tensors: Tensors) -> None:
    for name, value in tensors.items():
        read = checkpoint.tensor(name)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, value.astype(np.float32))


def refused(directory: Path, *parts: str) -> None:
    """Opening fails, and the message has every one of `parts`."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    for part in parts:
        assert part in str(caught.value)


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    module: ModuleType = pytest.importorskip("torch")
    return module


def as_torch(torch: Any, tensors: Tensors) -> dict[str, Any]:
    return {name: torch.from_numpy(value) for name, value in tensors.items()}


def test_reads_every_tensor(tmp_path: Path) -> None:
    tensors = gptj_tensors()
    checkpoint = Checkpoint.open(write(tmp_path, tensors))
    assert checkpoint.config == ModelConfig.from_hf(CONFIG)
    assert_holds(checkpoint, tensors)


def test_layer_has_the_names_within_the_layer(tmp_path: Path) -> None:
    tensors = gptj_tensors()
    checkpoint = Checkpoint.open(write(tmp_path, tensors))
    layer = checkpoint.layer(1)
    assert layer.keys() == layer_tensors(checkpoint.config).keys()
    np.testing.assert_array_equal(layer["attn.q_proj.weight"], tensors[Q_PROJ])


def test_accepts_names_without_prefix_and_ignores_buffers(tmp_path: Path) -> None:
    tensors = gptj_tensors()
    stored = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    stored["h.0.attn.bias"] = np.ones((1, 1, 16, 16), np.uint8)
    stored["h.0.attn.masked_bias"] = np.array(-1e9, np.float32)
    assert_holds(Checkpoint.open(write(tmp_path, stored)), tensors)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_converts_to_float32(tmp_path: Path, dtype: str) -> None:
    tensors = {name: value.astype(dtype) for name, value in gptj_tensors().items()}
    assert_holds(Checkpoint.open(write(tmp_path, tensors)), tensors)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_half_formats_convert_as_torch_does(
    tmp_path: Path, torch: Any, dtype: str, file: str
) -> None:
    from safetensors.torch import save_file as save_torch

    tensors = {k: v.to(getattr(torch, dtype)) for k, v in as_torch(torch, gptj_tensors()).items()}
    # The smallest subnormal, the largest value and a negative zero.
    tensors["lm_head.bias"][:3] = torch.tensor(
        [torch.finfo(getattr(torch, dtype)).smallest_normal / 4, 6e4, -0.0]
    )
    write_config(tmp_path)
    (torch.save if file.endswith(".bin") else save_torch)(tensors, tmp_path / file)
    checkpoint = Checkpoint.open(tmp_path)
    for name, value in tensors.items():
        assert checkpoint.tensor(name).tobytes() == value.float().numpy().tobytes()


def test_reads_what_transformers_saves(tmp_path: Path, torch: Any) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPTJForCausalLM(transformers.GPTJConfig(**CONFIG))
    model.save_pretrained(tmp_path)
    expected = {name: value.numpy() for name, value in model.state_dict().items()}
    assert_holds(Checkpoint.open(tmp_path), expected)


def test_reads_safetensors_shards(tmp_path: Path) -> None:
    tensors = gptj_tensors()
    write_shards(tmp_path, tensors)
    assert_holds(Checkpoint.open(tmp_path), tensors)


@pytest.mark.parametrize("zip_format", [True, False])
def test_reads_torch_files(tmp_path: Path, torch: Any, zip_format: bool) -> None:
    tensors = gptj_tensors()
    write_config(tmp_path)
    torch.save(
        as_torch(torch, tensors),
        tmp_path / "pytorch_model.bin",
        _use_new_zipfile_serialization=zip_format,
    )
    assert_holds(Checkpoint.open(tmp_path), tensors)


def test_reads_torch_shards(tmp_path: Path, torch: Any) -> None:
    tensors = gptj_tensors()
    write_config(tmp_path)
    weight_map = {}
    for number, (name, value) in enumerate(as_torch(torch, tensors).items()):
        torch.save({name: value}, tmp_path / f"pytorch_model-{number}.bin")
        weight_map[name] = f"pytorch_model-{number}.bin"
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_holds(Checkpoint.open(tmp_path), tensors)


def test_what_is_read_belongs_to_the_caller(tmp_path: Path, torch: Any) -> None:
    tensors = gptj_tensors()
    write_config(tmp_path)
    torch.save(as_torch(torch, tensors), tmp_path / "pytorch_model.bin")
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.tensor(Q_PROJ)[:] = 0
    assert_holds(checkpoint, tensors)


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    tensors = gptj_tensors()
    del tensors["lm_head.weight"]
    checkpoint = Checkpoint.open(write(tmp_path, tensors, tie_word_embeddings=True))
    np.testing.assert_array_equal(
        checkpoint.tensor("lm_head.weight"), tensors["transformer.wte.weight"]
    )


@pytest.mark.parametrize(
    ("tied", "name"), [(False, "lm_head.weight"), (False, "lm_head.bias"), (True, "lm_head.bias")]
)
def test_head_must_be_there(tmp_path: Path, tied: bool, name: str) -> None:
    tensors = gptj_tensors()
    del tensors[name]
    refused(write(tmp_path, tensors, tie_word_embeddings=tied), name, "model.safetensors")


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = gptj_tensors()
    del tensors[Q_PROJ]
    refused(write(tmp_path, tensors), Q_PROJ, "[8, 8]", "model.safetensors")


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    tensors = gptj_tensors()
    tensors[Q_PROJ] = tensors[Q_PROJ][:4]
    refused(write(tmp_path, tensors), Q_PROJ, "[4, 8]", "[8, 8]", "model.safetensors")


def test_wrong_dtype_is_named(tmp_path: Path) -> None:
    tensors = gptj_tensors()
    tensors[Q_PROJ] = tensors[Q_PROJ].astype(np.int8)
    refused(write(tmp_path, tensors), Q_PROJ, "I8", "BF16", "model.safetensors")


def test_wrong_torch_dtype_is_named(tmp_path: Path, torch: Any) -> None:
    tensors = as_torch(torch, gptj_tensors())
    tensors[Q_PROJ] = tensors[Q_PROJ].to(torch.int8)
    write_config(tmp_path)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    refused(tmp_path, Q_PROJ, "torch.int8", "pytorch_model.bin")


@pytest.mark.parametrize("name", ["h.0.attn.q_proj.lora_A.weight", "h.2.ln_1.weight"])
def test_unknown_tensor_is_refused(tmp_path: Path, name: str) -> None:
    tensors = gptj_tensors() | {f"transformer.{name}": np.ones(8, np.float32)}
    refused(write(tmp_path, tensors), name, "2 layers")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_found_on_reading(tmp_path: Path, value: float) -> None:
    tensors = gptj_tensors()
    tensors[Q_PROJ][3, 4] = value
    checkpoint = Checkpoint.open(write(tmp_path, tensors))
    checkpoint.layer(0)
    with pytest.raises(CheckpointError, match=f"{re.escape(Q_PROJ)}.*model.safetensors.* 1 value"):
        checkpoint.layer(1)


def test_float64_beyond_float32_is_refused(tmp_path: Path) -> None:
    tensors = {name: value.astype(np.float64) for name, value in gptj_tensors().items()}
    tensors[Q_PROJ][0, 0] = 1e300
    checkpoint = Checkpoint.open(write(tmp_path, tensors))
    with pytest.raises(CheckpointError, match="not finite"):
        checkpoint.tensor(Q_PROJ)


def test_missing_directory(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "absent", "does not exist")


def test_file_instead_of_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "is a file", "expected a directory")


def test_empty_directory(tmp_path: Path) -> None:
    refused(tmp_path, "config.json")


def test_no_weights(tmp_path: Path) -> None:
    write_config(tmp_path)
    refused(tmp_path, "no weights", "model.safetensors", "pytorch_model.bin")


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]", b""])
def test_bad_config(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, gptj_tensors())
    (tmp_path / "config.json").write_bytes(content)
    refused(tmp_path, "config.json", "JSON")


def test_other_architecture(tmp_path: Path) -> None:
    refused(write(tmp_path, gptj_tensors(), model_type="llama"), "llama", "gptj")


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_truncated_safetensors(tmp_path: Path, kept: int) -> None:
    file = write(tmp_path, gptj_tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(tmp_path, "model.safetensors", "truncated")


def test_safetensors_header_of_absurd_length(tmp_path: Path) -> None:
    file = write(tmp_path, gptj_tensors()) / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2**63) + file.read_bytes()[8:])
    refused(tmp_path, "model.safetensors", "damaged")


def test_git_lfs_pointer(tmp_path: Path) -> None:
    write_config(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 24207819307\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    refused(tmp_path, "model.safetensors", "git lfs pull")


def test_absent_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, gptj_tensors())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00002.safetensors", "index.json", "not there")


def test_shard_without_its_tensor(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, gptj_tensors())
    other = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    (weight_map[Q_PROJ],) = other - {weight_map[Q_PROJ]}
    write_index(tmp_path, weight_map)
    refused(tmp_path, Q_PROJ, weight_map[Q_PROJ], "index.json")


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "..", "", 3, None, ["a"]])
def test_shard_must_be_a_file_name(tmp_path: Path, shard: object) -> None:
    weight_map = write_shards(tmp_path, gptj_tensors())
    write_index(tmp_path, weight_map | {Q_PROJ: shard})
    refused(tmp_path, "names the shard", str(shard))


@pytest.mark.parametrize("weight_map", [None, {}, ["model.safetensors"]])
def test_index_without_weight_map(tmp_path: Path, weight_map: object) -> None:
    write_shards(tmp_path, gptj_tensors())
    write_index(tmp_path, weight_map)
    refused(tmp_path, "index.json", "weight_map")


class Malicious:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("zip_format", [True, False])
def test_pickled_code_is_refused_and_not_run(
    tmp_path: Path, torch: Any, monkeypatch: pytest.MonkeyPatch, zip_format: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    torch.save(
        as_torch(torch, gptj_tensors()) | {"extra": Malicious()},
        tmp_path / "pytorch_model.bin",
        _use_new_zipfile_serialization=zip_format,
    )
    refused(tmp_path, "pytorch_model.bin", "runs no code", "safetensors")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("zip_format", [True, False])
@pytest.mark.parametrize("kept", [0, 100, -500])
def test_truncated_torch_file(tmp_path: Path, torch: Any, zip_format: bool, kept: int) -> None:
    write_config(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save(as_torch(torch, gptj_tensors()), file, _use_new_zipfile_serialization=zip_format)
    file.write_bytes(file.read_bytes()[:kept])
    refused(tmp_path, "pytorch_model.bin", "damaged")


def test_torch_file_that_is_no_state_dict(tmp_path: Path, torch: Any) -> None:
    write_config(tmp_path)
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pytorch_model.bin", "no state dict")


def test_torch_file_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingLibraryError, match=r"-m pip install torch"):
        Checkpoint.open(tmp_path)


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    table = CONFIG | {"n_embd": 128, "n_layer": 16, "rotary_dim": 32}
    tensors = gptj_tensors(table)
    layer_bytes = sum(v.nbytes for k, v in tensors.items() if k.startswith("transformer.h.3."))
    write(tmp_path, tensors, **table)
    del tensors
    tracemalloc.start()
    try:
        checkpoint = Checkpoint.open(tmp_path)
        _, open_bytes = tracemalloc.get_traced_memory()
        checkpoint.layer(3)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert open_bytes < layer_bytes / 2
    assert peak_bytes < 1.5 * layer_bytes


@pytest.mark.parametrize(
    ("file", "says"),
    [("quant.json", "is a quantized checkpoint already"), ("manifest.json", "is a bundle")],
)
def test_what_was_made_of_a_checkpoint_is_none(tmp_path: Path, file: str, says: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(CheckpointError, match=f"{says}; give the directory of a Hugging Face"):
        Checkpoint.open(tmp_path)
