"""The quantized checkpoint: a directory of safetensors files, decoder.onnx and quant.json.

`outer.safetensors` holds the embedding, the final norm, the head and the rotary tables;
`layer.NNN.safetensors` one decoder layer each. Everything is row-major in logical order, so that
the directory belongs to no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edge_rt import config as settings
from edge_rt.bundle import QuantizationSummary
from edge_rt.errors import CheckpointError, ConfigError
from edge_rt.model.gptj import LINEARS, Head, Layer, Linear, ModelConfig, rotary_tables
from edge_rt.model.graph import OUTER_FILE, layer_file
from edge_rt.quant.pack import QuantizedLinear
from edge_rt.recipes import QuantRecipe
from edge_rt.storage import FileEntry, check_files, check_names, read_json

MARKER = "quant.json"
SCHEMA_VERSION = 1

Array = npt.NDArray[np.generic]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class QuantInfo:
    """quant.json: what was done to which model."""

    model: ModelConfig
    recipe: QuantRecipe
    quantization: QuantizationSummary
    edge_rt_version: str
    files: dict[str, FileEntry]
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        check_names(self.files)


def lossless(x: F32) -> Array:
    """As float16 where that keeps every value, else as float32."""
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), x) else x


def save_layer(
    directory: Path, index: int, layer: Layer, quantized: dict[str, QuantizedLinear]
) -> None:
    """Write one layer: its norm, and each linear quantized or, where it is not given, as it is."""
    prefix = f"h.{index}"
    tensors: dict[str, Array] = {
        f"{prefix}.ln_1.weight": layer.ln_weight,
        f"{prefix}.ln_1.bias": layer.ln_bias,
    }
    for name, linear in layer.linears.items():
        if name in quantized:
            parts = quantized[name].tensors()
        else:
            parts = {"weight": lossless(linear.weight)}
            if linear.bias is not None:
                parts["bias"] = linear.bias
        tensors.update({f"{prefix}.{name}.{part}": value for part, value in parts.items()})
    _save(directory / layer_file(index), tensors)


def save_outer(
    directory: Path, embedding: Array, head: Head, head_weight: Array, config: ModelConfig
) -> None:
    """Write what lies outside the layers; `head_weight` is the stored form of the head's weight."""
    cos, sin = rotary_tables(config)
    tensors: dict[str, Array] = {
        "wte.weight": embedding,
        "ln_f.weight": head.ln_weight,
        "ln_f.bias": head.ln_bias,
        "lm_head.weight": head_weight,
        "lm_head.bias": head.bias,
        "rotary.cos": cos,
        "rotary.sin": sin,
    }
    _save(directory / OUTER_FILE, tensors)


def _save(path: Path, tensors: dict[str, Array]) -> None:
    # Not save_file: it makes files that only their owner can read, and a service is someone else.
    path.write_bytes(save({name: np.ascontiguousarray(value) for name, value in tensors.items()}))


class QuantizedCheckpoint:
    """Reads a quantized checkpoint back, layer by layer, as float32 for the reference forward."""

    def __init__(self, directory: Path, info: QuantInfo) -> None:
        self.directory = directory
        self.info = info

    @classmethod
    def open(cls, directory: Path) -> QuantizedCheckpoint:
        """Read quant.json; CheckpointError says what is wrong with it."""
        path = directory / MARKER
        if not path.is_file():
            raise CheckpointError(
                f"{directory} is no quantized checkpoint: it has no {MARKER}; "
                f"make one with edge-rt quantize"
            )
        table = read_json(path, CheckpointError)
        version = table.get("schema_version")
        if version != SCHEMA_VERSION:
            raise CheckpointError(
                f"{path} has schema version {version}, this edge_rt reads {SCHEMA_VERSION}; "
                f"quantize the checkpoint again"
            )
        try:
            return cls(directory, settings.from_table(QuantInfo, table, str(path)))
        except ConfigError as error:
            raise CheckpointError(f"{error}; quantize the checkpoint again") from error

    def check_files(self) -> None:
        """CheckpointError names the first file that is missing, truncated or altered."""
        check_files(self.directory, self.info.files, CheckpointError, "quantize again")

    def layer(self, index: int) -> Layer:
        """One layer with its linears dequantized."""
        tensors = self._load(layer_file(index))
        prefix = f"h.{index}"
        linears = {}
        for spec in LINEARS:
            start = f"{prefix}.{spec.name}."
            parts = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
            linears[spec.name] = _linear(parts, self._in_features(spec.reads))
        return Layer(tensors[f"{prefix}.ln_1.weight"], tensors[f"{prefix}.ln_1.bias"], linears)

    def embedding(self) -> F32:
        """[vocab, n_embd]."""
        return self._load(OUTER_FILE, ("wte.weight",))["wte.weight"].astype(np.float32)

    def head(self) -> Head:
        """The final norm and the vocabulary product."""
        names = ("ln_f.weight", "ln_f.bias", "lm_head.weight", "lm_head.bias")
        return Head(*(x.astype(np.float32) for x in self._load(OUTER_FILE, names).values()))

    def _in_features(self, reads: str) -> int:
        return self.info.model.n_inner if reads == "gelu" else self.info.model.n_embd

    def _load(self, file: str, names: Sequence[str] | None = None) -> dict[str, npt.NDArray[Any]]:
        try:
            with safe_open(self.directory / file, framework="np") as tensors:
                wanted = tensors.keys() if names is None else names
                return {name: tensors.get_tensor(name) for name in wanted}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.directory / file} cannot be read ({error}); quantize again"
            ) from error


def _linear(parts: dict[str, npt.NDArray[Any]], in_features: int) -> Linear:
    if "qweight" not in parts:
        return Linear(parts["weight"].astype(np.float32), parts.get("bias"))
    quantized = QuantizedLinear.from_tensors(parts)
    return Linear(quantized.dequantize(in_features), quantized.bias, quantized.post_scale)
