"""The quantized checkpoint: a directory of safetensors files, decoder.onnx and quant.json.

`outer.safetensors` holds the embedding, the final norm, the head and the rotary tables;
`layer.NNN.safetensors` one decoder layer each. Everything is row-major in logical order, so that
the directory belongs to no engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edge_rt import config as settings
from edge_rt.bundle import QuantizationSummary
from edge_rt.errors import CheckpointError, ConfigError
from edge_rt.model.gptj import (
    LINEARS,
    Head,
    Layer,
    Linear,
    ModelConfig,
    in_features,
    rotary_tables,
)
from edge_rt.model.graph import OUTER_FILE, layer_file
from edge_rt.quant.layer import QuantizedLayer
from edge_rt.quant.pack import QuantizedLinear
from edge_rt.quant.report import LinearReport
from edge_rt.recipes import QuantRecipe
from edge_rt.storage import FileEntry, check_files, check_names, read_json, write_atomic

MARKER = "quant.json"
SCHEMA_VERSION = 2
IMPORTED = "imported"  # the recipe of a checkpoint that was quantized elsewhere
# In a layer file's metadata: the reports, and a SHA-256 of them and the tensors. Under one key, as
# safetensors writes several in no fixed order.
_LAYER = "edge_rt.layer"

Array = npt.NDArray[np.generic]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class QuantInfo:
    """quant.json: what was done to which model."""

    model: ModelConfig
    recipe: QuantRecipe
    quantization: QuantizationSummary
    edge_rt_version: str
    layers: list[list[LinearReport]]
    files: dict[str, FileEntry]
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        check_names(self.files)


def lossless(x: F32, _what: str = "") -> Array:
    """As float16 where that keeps every value, else as float32."""
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), x) else x


def save_layer(directory: Path, index: int, made: QuantizedLayer) -> None:
    """Write one layer: its norm, each linear quantized or else as it is, and the reports.

    The file is there whole or not at all.
    """
    prefix = f"h.{index}"
    tensors: dict[str, Array] = {
        f"{prefix}.ln_1.weight": made.layer.ln_weight,
        f"{prefix}.ln_1.bias": made.layer.ln_bias,
    }
    for name, linear in made.layer.linears.items():
        if name in made.linears:
            parts = made.linears[name].tensors()
        else:
            parts = {"weight": lossless(linear.weight)}
            if linear.bias is not None:
                parts["bias"] = linear.bias
        tensors.update({f"{prefix}.{name}.{part}": value for part, value in parts.items()})
    reports = [asdict(report) for report in made.reports]
    facts = json.dumps({"reports": reports, "sha256": _digest(tensors, reports)})
    _save(directory / layer_file(index), tensors, {_LAYER: facts})


def has_layer(directory: Path, index: int) -> bool:
    """Whether save_layer's file is there, and holds what save_layer wrote."""
    path = directory / layer_file(index)
    if not path.is_file():
        return False
    try:
        tensors, metadata = _load(path)
        facts = json.loads(metadata[_LAYER])
        return bool(
            all(name.startswith(f"h.{index}.") for name in tensors)
            and facts["sha256"] == _digest(tensors, facts["reports"])
        )
    except (CheckpointError, KeyError, TypeError, ValueError):
        return False


def _digest(tensors: Mapping[str, Array], reports: object) -> str:
    digest = hashlib.sha256(json.dumps(reports).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def load_layer(directory: Path, index: int, config: ModelConfig) -> QuantizedLayer:
    """Read back what save_layer wrote."""
    path = directory / layer_file(index)
    tensors, metadata = _load(path)
    prefix = f"h.{index}"
    linears: dict[str, Linear] = {}
    quantized: dict[str, QuantizedLinear] = {}
    for spec in LINEARS:
        start = f"{prefix}.{spec.name}."
        parts = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
        if "qweight" in parts:
            quantized[spec.name] = QuantizedLinear.from_tensors(parts)
            linears[spec.name] = quantized[spec.name].linear(in_features(spec, config))
        else:
            linears[spec.name] = Linear(parts["weight"].astype(np.float32), parts.get("bias"))
    layer = Layer(tensors[f"{prefix}.ln_1.weight"], tensors[f"{prefix}.ln_1.bias"], linears)
    reports = [
        settings.from_table(LinearReport, table, str(path))
        for table in json.loads(metadata.get(_LAYER, '{"reports": []}'))["reports"]
    ]
    return QuantizedLayer(layer, quantized, reports)


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


def _save(path: Path, tensors: dict[str, Array], metadata: dict[str, str] | None = None) -> None:
    # Not save_file: it makes files that only their owner can read, and a service is someone else.
    contiguous = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    write_atomic(path, save(contiguous, metadata))


def _load(
    path: Path, names: Sequence[str] | None = None
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """All tensors of a file, or those of `names`, and its metadata."""
    try:
        with safe_open(path, framework="np") as tensors:
            wanted = tensors.keys() if names is None else names
            return {name: tensors.get_tensor(name) for name in wanted}, tensors.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); quantize again") from error


def _shapes(path: Path, names: Sequence[str]) -> list[tuple[int, ...]]:
    try:
        with safe_open(path, framework="np") as tensors:
            return [tuple(tensors.get_slice(name).get_shape()) for name in names]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); quantize again") from error


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
            found = f"has no {MARKER}" if directory.is_dir() else "is not a directory"
            raise CheckpointError(
                f"{directory} is no quantized checkpoint: it {found}; "
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
            opened = cls(directory, settings.from_table(QuantInfo, table, str(path)))
        except ConfigError as error:
            raise CheckpointError(f"{error}; quantize the checkpoint again") from error
        opened._check_sizes()
        return opened

    def _check_sizes(self) -> None:
        """CheckpointError where quant.json describes another model than the files hold."""
        config = self.info.model
        names = ("wte.weight", "lm_head.weight", "rotary.cos")
        expected = (
            (config.vocab_size, config.n_embd),
            (config.vocab_size, config.n_embd),
            (config.n_positions, config.rotary_dim // 2),
        )
        shapes = _shapes(self.directory / OUTER_FILE, names)
        for name, shape, found in zip(names, expected, shapes, strict=True):
            if shape != found:
                raise CheckpointError(
                    f"{self.directory / MARKER} describes {name} as {list(shape)}, but "
                    f"{OUTER_FILE} holds {list(found)}; quantize the checkpoint again"
                )
        layers = sum(name.startswith("layer.") for name in self.info.files)
        if layers != config.n_layer:
            raise CheckpointError(
                f"{self.directory / MARKER} describes {config.n_layer} layers, but lists files of "
                f"{layers}; quantize the checkpoint again"
            )

    def check_files(self) -> None:
        """CheckpointError names the first file that is missing, truncated or altered."""
        check_files(self.directory, self.info.files, CheckpointError, "quantize again")

    def layer(self, index: int) -> Layer:
        """One layer with its linears dequantized."""
        return load_layer(self.directory, index, self.info.model).layer

    def embedding(self) -> F32:
        """[vocab, n_embd]."""
        tensors, _ = _load(self.directory / OUTER_FILE, ("wte.weight",))
        return tensors["wte.weight"].astype(np.float32)

    def head(self) -> Head:
        """The final norm and the vocabulary product."""
        names = ("ln_f.weight", "ln_f.bias", "lm_head.weight", "lm_head.bias")
        tensors, _ = _load(self.directory / OUTER_FILE, names)
        return Head(*(x.astype(np.float32) for x in tensors.values()))
