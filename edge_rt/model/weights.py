"""The weight files of a Hugging Face directory: which tensors they hold, and reading one of them.

A directory holds safetensors files or pickled state dicts, whole or in shards with an index.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from edge_rt.errors import CheckpointError, MissingLibraryError
from edge_rt.model.stored import stored_tensors
from edge_rt.storage import read_json

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

FLOATS = ("F16", "BF16", "F32", "F64")
INTEGERS = ("I32",)
# In the order in which transformers looks for them.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

_NUMPY = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "I32": "<i4"}
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a file says about one tensor; `dtype` in safetensors' names."""

    dtype: str
    shape: tuple[int, ...]


class _WeightFile(Protocol):
    path: Path
    tensors: Mapping[str, _Stored]

    def floats(self, key: str) -> F32:
        """Give a tensor of FLOATS in memory of its own, as float32."""
        ...

    def integers(self, key: str) -> I32:
        """Give a tensor of INTEGERS in memory of its own."""
        ...


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One tensor in one file, under the name `key` that the file gives it."""

    file: _WeightFile
    key: str

    @property
    def shape(self) -> tuple[int, ...]:
        """What the file says."""
        return self.file.tensors[self.key].shape

    def check(self, shape: tuple[int, ...], dtypes: Sequence[str], remedy: str) -> None:
        """CheckpointError, with the remedy, for another shape or none of `dtypes`."""
        stored = self.file.tensors[self.key]
        if stored.shape != shape:
            raise CheckpointError(
                f"{self} has shape {list(stored.shape)}, expected {list(shape)} from config.json"
            )
        if stored.dtype not in dtypes:
            raise CheckpointError(
                f"{self} is {stored.dtype}, expected one of {', '.join(dtypes)}; {remedy}"
            )

    def floats(self) -> F32:
        """Read it; CheckpointError if it holds a value that float32 cannot."""
        value = self.file.floats(self.key)
        finite = np.isfinite(value)
        if not finite.all():
            raise CheckpointError(
                f"{self} has {value.size - np.count_nonzero(finite)} values that are not finite "
                f"in float32; the checkpoint is damaged"
            )
        return value

    def integers(self) -> I32:
        """Read it as int32, which it was checked to be."""
        return self.file.integers(self.key)

    def __str__(self) -> str:
        return f"{self.key} in {self.file.path}"


def find_weights(directory: Path, names: Sequence[str] = WEIGHT_FILES) -> dict[str, WeightEntry]:
    """Every tensor by its name in the first of the files `names` that is there, whole or in shards.

    CheckpointError names the file that is missing, damaged, or not what its name says.
    """
    for name in names:
        if (directory / name).is_file():
            file = _open(directory / name)
            return {key: WeightEntry(file, key) for key in file.tensors}
        if (directory / f"{name}.index.json").is_file():
            return _find_shards(directory / f"{name}.index.json")
    raise CheckpointError(
        f"{directory} has no weights, expected {' or '.join(names)}, "
        f"whole or in shards with an .index.json"
    )


def _find_shards(index: Path) -> dict[str, WeightEntry]:
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
    return {key: WeightEntry(files[shard], key) for key, shard in weight_map.items()}


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

    def floats(self, key: str) -> F32:
        stored = self._stored[key]
        raw = self._raw(key)
        if stored.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            wide = raw.astype(np.uint32)
            wide <<= 16
            return wide.view(np.float32).reshape(stored.shape)
        with np.errstate(over="ignore"):  # the caller refuses what became infinite
            return raw.astype(np.float32, copy=False).reshape(stored.shape)

    def integers(self, key: str) -> I32:
        return self._raw(key).astype(np.int32, copy=False).reshape(self._stored[key].shape)

    def _raw(self, key: str) -> npt.NDArray[Any]:
        stored = self._stored[key]
        count = int(np.prod(stored.shape))
        return np.fromfile(self.path, _NUMPY[stored.dtype], count, offset=stored.offset)


_TORCH_DTYPES = {
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
    "torch.float64": "F64",
    "torch.int32": "I32",
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

    def floats(self, key: str) -> F32:
        # Cloned: callers may write to what they get, and the map stays as the file is.
        array: F32 = self._state[key].detach().clone().float().contiguous().numpy()
        return array

    def integers(self, key: str) -> I32:
        array: I32 = self._state[key].detach().clone().contiguous().numpy()
        return array
