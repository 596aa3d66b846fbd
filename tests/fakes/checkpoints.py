"""Small GPT-J checkpoints in the forms that Hugging Face writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from edge_rt.errors import CheckpointError
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


def refused(directory: Path, *parts: str) -> None:
    """Opening fails, and the message has every one of `parts`."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    for part in parts:
        assert part in str(caught.value)


def as_torch(torch: Any, tensors: Tensors) -> dict[str, Any]:
    return {name: torch.from_numpy(value) for name, value in tensors.items()}
