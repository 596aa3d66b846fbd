"""Weight files that are damaged, incomplete or meant to do harm: each is refused by name."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.checkpoints import (
    Q_PROJ,
    as_torch,
    gptj_tensors,
    refused,
    write,
    write_config,
    write_index,
    write_shards,
)

from edge_rt.errors import MissingLibraryError
from edge_rt.model.checkpoint import Checkpoint


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
