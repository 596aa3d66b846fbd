"""Any Hugging Face GPT-J directory, read one tensor at a time.

Everything that can be wrong with names, shapes and dtypes is found at open, before a weight is
read; values are checked as they are read.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from edge_rt.errors import CheckpointError, MissingLibraryError
from edge_rt.model.gptj import F32, ModelConfig, layer_tensors, outer_tensors
from edge_rt.model.stored import stored_tensors
from edge_rt.storage import read_json

_PREFIX = "transformer."
_BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal mask, which older releases stored
_STORED = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8"}
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a file says about one tensor; `dtype` in safetensors' names."""

    dtype: str
    shape: tuple[int, ...]


class _WeightFile(Protocol):
    path: Path
    tensors: Mapping[str, _Stored]

    def read(self, key: str) -> F32:
        """Give a tensor in memory of its own, as float32."""
        ...


@dataclass(frozen=True, slots=True)
class _Entry:
    file: _WeightFile
    key: str


class Checkpoint:
    """A GPT-J checkpoint whose tensors are all there in the expected shapes.

    Tensors carry the names of GPTJForCausalLM; a file may leave out the prefix `transformer.`.
    """

    def __init__(self, directory: Path, config: ModelConfig, entries: Mapping[str, _Entry]) -> None:
        self.directory = directory
        self.config = config
        self._entries = entries

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Find and check every tensor; CheckpointError names what is missing or wrong."""
        if not directory.is_dir():
            found = "is a file" if directory.exists() else "does not exist"
            raise CheckpointError(
                f"{directory} {found}, expected a directory with config.json and the weights"
            )
        if not (directory / "config.json").is_file():
            raise CheckpointError(
                f"{directory} has no config.json; give the directory of a Hugging Face checkpoint"
            )
        config = ModelConfig.from_hf(read_json(directory / "config.json", CheckpointError))
        return cls(directory, config, _match(_expected(config), _find(directory), config))

    def tensor(self, name: str) -> F32:
        """Read one tensor; CheckpointError if it holds a value that float32 cannot."""
        entry = self._entries[name]
        value = entry.file.read(entry.key)
        finite = np.isfinite(value)
        if not finite.all():
            raise CheckpointError(
                f"{entry.key} in {entry.file.path} has {value.size - np.count_nonzero(finite)} "
                f"values that are not finite in float32; the checkpoint is damaged"
            )
        return value

    def layer(self, index: int) -> dict[str, F32]:
        """Read one layer's tensors, by their names within the layer (`attn.q_proj.weight`)."""
        return {
            name: self.tensor(f"transformer.h.{index}.{name}")
            for name in layer_tensors(self.config)
        }


def _expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    layers = {
        f"transformer.h.{index}.{name}": shape
        for index in range(config.n_layer)
        for name, shape in layer_tensors(config).items()
    }
    return outer_tensors(config) | layers


def _match(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, _Entry], config: ModelConfig
) -> dict[str, _Entry]:
    by_name = {
        key if key.startswith((_PREFIX, "lm_head.")) else _PREFIX + key: entry
        for key, entry in found.items()
        if not key.endswith(_BUFFERS)
    }
    if config.tie_word_embeddings and "transformer.wte.weight" in by_name:
        by_name.setdefault("lm_head.weight", by_name["transformer.wte.weight"])
    for name, shape in expected.items():
        if name not in by_name:
            files = ", ".join(sorted({entry.file.path.name for entry in found.values()}))
            raise CheckpointError(
                f"the checkpoint has no tensor {name}, expected with shape {list(shape)} in {files}"
            )
        _check(by_name[name], shape)
    unexpected = sorted(by_name.keys() - expected.keys())
    if unexpected:
        entry = by_name[unexpected[0]]
        # Leaving out weights that the model was trained with would change its answers unseen.
        raise CheckpointError(
            f"{entry.key} in {entry.file.path} is no tensor of a GPT-J with "
            f"{config.n_layer} layers; check config.json, or merge adapters first"
        )
    return by_name


def _check(entry: _Entry, shape: tuple[int, ...]) -> None:
    stored = entry.file.tensors[entry.key]
    if stored.shape != shape:
        raise CheckpointError(
            f"{entry.key} in {entry.file.path} has shape {list(stored.shape)}, expected "
            f"{list(shape)} from config.json"
        )
    if stored.dtype not in _STORED:
        raise CheckpointError(
            f"{entry.key} in {entry.file.path} is {stored.dtype}, expected one of "
            f"{', '.join(_STORED)}; give the checkpoint before quantization"
        )


def _find(directory: Path) -> dict[str, _Entry]:
    """Look for weights in the order in which transformers does."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (directory / name).is_file():
            file = _open(directory / name)
            return {key: _Entry(file, key) for key in file.tensors}
        if (directory / f"{name}.index.json").is_file():
            return _find_shards(directory / f"{name}.index.json")
    raise CheckpointError(
        f"{directory} has no weights, expected model.safetensors or pytorch_model.bin, "
        f"whole or in shards with an .index.json"
    )


def _find_shards(index: Path) -> dict[str, _Entry]:
    weight_map = read_json(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; download the checkpoint again")
    files: dict[str, _WeightFile] = {}
    for key, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} names the shard {shard!r}, expected a plain file name")
        if shard not in files:
            if not (index.parent / shard).is_file():
                raise CheckpointError(
                    f"{index} names the shard {shard}, which is not there; download it"
                )
            files[shard] = _open(index.parent / shard)
        if key not in files[shard].tensors:
            raise CheckpointError(
                f"{index} says that {shard} holds {key}, which it does not; "
                f"download the checkpoint again"
            )
    return {key: _Entry(files[shard], key) for key, shard in weight_map.items()}


def _open(path: Path) -> _WeightFile:
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the weights; fetch them with: git lfs pull"
            )
    return _Safetensors(path) if path.suffix == ".safetensors" else _TorchPickle(path)


class _Safetensors:
    """Reads each tensor by its place in the file: safetensors' NumPy interface has no BF16."""

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, framework="numpy"):
                pass  # opening checks the header and that it covers the file exactly
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is truncated or damaged ({error}); download it again"
            ) from error
        self.path = path
        self._stored = stored_tensors(path)
        self.tensors: Mapping[str, _Stored] = {
            key: _Stored(tensor.dtype, tensor.shape) for key, tensor in self._stored.items()
        }

    def read(self, key: str) -> F32:
        stored = self._stored[key]
        count = int(np.prod(stored.shape))
        raw = np.fromfile(self.path, _STORED[stored.dtype], count, offset=stored.offset)
        if stored.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            wide = raw.astype(np.uint32)
            wide <<= 16
            return wide.view(np.float32).reshape(stored.shape)
        with np.errstate(over="ignore"):  # the caller refuses what became infinite
            return raw.astype(np.float32, copy=False).reshape(stored.shape)


_TORCH_DTYPES = {
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
    "torch.float64": "F64",
}


class _TorchPickle:
    """A pickled state dict, mapped rather than read where its format allows."""

    def __init__(self, path: Path) -> None:
        try:
            import torch
        except ImportError as error:
            raise MissingLibraryError("torch", "quantize-torch") from error
        try:
            # Only the zip format, torch's since 1.6, can be mapped.
            state = torch.load(
                path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True
            )
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} is damaged or holds more than plain tensors, and edge_rt runs no code "
                f"from a checkpoint; convert it to safetensors"
            ) from error
        except Exception as error:  # torch has no exception of its own for a damaged file
            raise CheckpointError(
                f"{path} is truncated or damaged ({error}); download it again"
            ) from error
        if not isinstance(state, dict) or not all(map(torch.is_tensor, state.values())):
            raise CheckpointError(
                f"{path} is no state dict, expected names and tensors; "
                f"save the model again with save_pretrained"
            )
        self.path = path
        self.tensors: Mapping[str, _Stored] = {
            key: _Stored(_TORCH_DTYPES.get(str(value.dtype), str(value.dtype)), tuple(value.shape))
            for key, value in state.items()
        }
        self._state: dict[str, Any] = state

    def read(self, key: str) -> F32:
        # Cloned: callers may write to what they get, and the map stays as the file is.
        value = self._state[key].detach().clone().float().contiguous()
        array: F32 = value.numpy()
        return array
