import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.checkpoints import (
    CONFIG,
    Q_PROJ,
    Tensors,
    as_torch,
    gptj_tensors,
    refused,
    write,
    write_config,
    write_shards,
)

from edge_rt.errors import CheckpointError
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.model.gptj import ModelConfig, layer_tensors


def assert_holds(checkpoint: Checkpoint, tensors: Tensors) -> None:
    for name, value in tensors.items():
        read = checkpoint.tensor(name)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, value.astype(np.float32))


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


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("absent", "does not exist"),
        ("file", "is a file, expected a directory"),
        ("empty", "has no config.json"),
        ("quant.json", "is a quantized checkpoint already; give the directory of a Hugging Face"),
        ("manifest.json", "is a bundle; give the directory of a Hugging Face"),
    ],
)
def test_no_checkpoint(tmp_path: Path, name: str, says: str) -> None:
    directory = tmp_path / name
    if name == "file":
        directory.touch()
    elif name != "absent":
        directory.mkdir()
        if name != "empty":
            (directory / name).write_text("{}")
    refused(directory, f"{directory} {says}")


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
