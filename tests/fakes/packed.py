"""GPT-J checkpoints as AutoAWQ and GPTQ's programs pack them.

The packers are written from the definitions, place by place, and share nothing with edge_rt.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

Array = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]

MODULES = {
    "attn_qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "mlp_fc_in": ("mlp.fc_in",),
    "attn_out": ("attn.out_proj",),
    "mlp_fc_out": ("mlp.fc_out",),
}
NAMES = [name for names in MODULES.values() for name in names]
Q_PROJ = "transformer.h.1.attn.q_proj"
FC_OUT = "transformer.h.1.mlp.fc_out"
ACT = "transformer.h.1.mlp.act.scales"
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False}
V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
BY_GPTQMODEL = GPTQ | {"meta": {"quantizer": ["optimum:1.24.0", "gptqmodel:2.0.0"]}}
AWQ_SLOTS = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}


@dataclass
class Source:
    """One quantized linear: q [N, K], zeros and scales [N, G], the group of each input [K]."""

    q: Array
    zeros: Array
    scales: Array
    owner: Array

    @property
    def weight(self) -> F64:
        scales = self.scales.astype(np.float64)[:, self.owner]
        return (self.q.astype(np.float64) - self.zeros[:, self.owner]) * scales


def random_source(seed: int, n: int, k: int, group: int, lowest: int = 0) -> Source:
    rng = np.random.default_rng(seed)
    group = k if group == -1 else group
    groups = -(-k // group)
    return Source(
        q=rng.integers(0, 16, (n, k)),
        zeros=rng.integers(lowest, 16, (n, groups)),
        scales=rng.uniform(0.002, 0.02, (n, groups)).astype(np.float16),
        owner=np.arange(k) // group,
    )


def along_columns(values: Array, slots: dict[int, int]) -> Array:
    """[rows, 8 c] -> int32 [rows, c]; `slots` is the nibble of each of eight places."""
    words = np.zeros((values.shape[0], values.shape[1] // 8), np.int64)
    for column in range(values.shape[1]):
        words[:, column // 8] += values[:, column] * 16 ** slots[column % 8]
    return words.astype(np.uint32).view(np.int32)


def awq_tensors(source: Source) -> dict[str, Array]:
    return {
        "qweight": along_columns(source.q.T, AWQ_SLOTS),
        "qzeros": along_columns(source.zeros.T, AWQ_SLOTS),
        "scales": np.ascontiguousarray(source.scales.T),
    }


def gptq_tensors(source: Source, less: int) -> dict[str, Array]:
    places = {place: place for place in range(8)}
    return {
        "qweight": np.ascontiguousarray(along_columns(source.q, places).T),
        "qzeros": along_columns(source.zeros.T - less, places),
        "scales": np.ascontiguousarray(source.scales.T),
        "g_idx": source.owner.astype(np.int32),
    }


Pack = Callable[[Source], dict[str, Array]]
PACKS: dict[str, tuple[dict[str, Any], Pack, int]] = {
    "awq": (AWQ, awq_tensors, 0),
    "gptq": (GPTQ, lambda source: gptq_tensors(source, 1), 1),
    "gptq_v2": (V2, lambda source: gptq_tensors(source, 0), 0),
}


@dataclass
class Packed:
    """A packed directory in the making: what will be written, and what is in it."""

    directory: Path
    origin: Path
    tensors: dict[str, Array]
    sources: dict[str, Source]
    config: dict[str, Any]
    quantization: dict[str, Any]

    def write(self, file: str = "model.safetensors", *, own: str | None = None) -> Path:
        config = dict(self.config)
        if own is None:
            config["quantization_config"] = self.quantization
        else:
            (self.directory / own).write_text(json.dumps(self.quantization))
        (self.directory / "config.json").write_text(json.dumps(config))
        save_file(self.tensors, self.directory / file)
        return self.directory

    def replace(self, module: str, source: Source, pack: Pack) -> None:
        self.sources[module] = source
        self.tensors |= {f"{module}.{name}": value for name, value in pack(source).items()}


Make = Callable[..., Packed]


def build(directory: Path, origin: Path, kind: str, group: int) -> Packed:
    """The checkpoint `origin` packed by `kind`, with random weights; nothing is written yet."""
    table, pack, lowest = PACKS[kind]
    config = json.loads((origin / "config.json").read_text())
    tensors = load_file(origin / "model.safetensors")
    packed = Packed(directory, origin, tensors, {}, config, table | {"group_size": group})
    for index in range(config["n_layer"]):
        for seed, name in enumerate(NAMES):
            module = f"transformer.h.{index}.{name}"
            n, k = tensors.pop(f"{module}.weight").shape
            packed.replace(module, random_source(10 * index + seed, n, k, group, lowest), pack)
    return packed


def leave_float(packed: Packed, module: str) -> Array:
    for name in [name for name in packed.tensors if name.startswith(f"{module}.")]:
        if not name.endswith(".bias"):
            del packed.tensors[name]
    weight = load_file(packed.origin / "model.safetensors")[f"{module}.weight"]
    packed.tensors[f"{module}.weight"] = weight
    return weight
