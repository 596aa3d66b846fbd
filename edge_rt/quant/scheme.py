"""What a checkpoint that AutoAWQ, AutoGPTQ or GPTQModel quantized says about how it is packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edge_rt.errors import CheckpointError
from edge_rt.model.weights import WEIGHT_FILES
from edge_rt.storage import read_json

# Written beside config.json by AutoGPTQ and by AutoAWQ before config.json had a place for it.
_OWN_FILES = ("quantize_config.json", "quant_config.json")
_STORED_GROUPS = (128, 64, 32)
# By method: the layouts that are read, the first where none is named; the keys that name it; and
# how to get one.
_LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "awq": (
        ("gemm",),
        ("version", "checkpoint_format", "format"),
        'quantize with AutoAWQ and "version": "GEMM"',
    ),
    "gptq": (
        ("gptq", "gptq_v2"),
        ("checkpoint_format", "format"),
        "save it with GPTQModel and the format 'gptq'",
    ),
}

REQUANTIZE = "quantize the float checkpoint with edge-rt quantize"


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """The packing of one checkpoint, checked to be one that edge_rt reads.

    `group_size` is the source's: input channels that share a scale, None where a whole column does.
    `exact_zeros`: zero points are stored as they are (gptq_v2, awq), else less one (gptq).
    `whole_words`: that one was taken from whole words, borrows included (GPTQModel).
    `symmetric`: the source says that every zero point is 8.
    """

    method: Literal["awq", "gptq"]
    group_size: int | None
    exact_zeros: bool
    whole_words: bool
    symmetric: bool
    desc_act: bool
    files: tuple[str, ...]

    @classmethod
    def read(cls, directory: Path, config: Mapping[str, Any]) -> PackedScheme:
        """Take it from config.json, or from the file beside it; CheckpointError if unreadable."""
        path, table = _find(directory, config)
        method = _method(path, table)
        bits = table.get("bits", table.get("w_bit"))
        if bits != 4 or type(bits) is not int:
            raise CheckpointError(
                f"{path} says bits {bits!r}, edge_rt holds 4; make the checkpoint with 4 bits, "
                f"or {REQUANTIZE}"
            )
        layout = _layout(path, table, method)
        group_size = _group_size(path, table)
        names = [
            *WEIGHT_FILES,
            f"gptq_model-4bit-{-1 if group_size is None else group_size}g.safetensors",
        ]
        base_name = table.get("model_file_base_name")
        if isinstance(base_name, str) and base_name and Path(base_name).name == base_name:
            names.append(f"{base_name}.safetensors")
        return cls(
            method=method,
            group_size=group_size,
            exact_zeros=layout != "gptq",
            whole_words=_by_gptqmodel(table),
            # GPTQModel's `dynamic` may set `sym` of some modules alone.
            symmetric=method == "gptq" and table.get("sym") is True and not table.get("dynamic"),
            desc_act=table.get("desc_act") is True,
            files=tuple(names),
        )

    def stored_group_size(self, in_features: tuple[int, ...]) -> int:
        """The largest group of ours that no group of the source crosses: 128, 64 or 32.

        A whole column's one scale fits any: then it is the largest that divides `in_features`.
        """
        sizes = in_features if self.group_size is None else (self.group_size,)
        return next((g for g in _STORED_GROUPS if all(s % g == 0 for s in sizes)), 32)

    def source_group(self, in_features: int) -> int:
        """Input channels that share a scale, of a linear with so many."""
        return in_features if self.group_size is None else self.group_size


def is_packed(directory: Path) -> bool:
    """Whether a checkpoint's directory says that its weights are quantized already.

    CheckpointError for a config.json that is no JSON object.
    """
    config = directory / "config.json"
    if any((directory / name).is_file() for name in _OWN_FILES):
        return True
    return config.is_file() and bool(read_json(config, CheckpointError).get("quantization_config"))


def _find(directory: Path, config: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    table = config.get("quantization_config")
    if table:
        if not isinstance(table, dict):
            raise CheckpointError(
                f"{directory / 'config.json'}: quantization_config is {table!r}, expected an "
                f"object; download the checkpoint again"
            )
        return directory / "config.json", table
    for name in _OWN_FILES:
        if (directory / name).is_file():
            return directory / name, read_json(directory / name, CheckpointError)
    raise CheckpointError(
        f"{directory} has no quantization_config in config.json and no {' or '.join(_OWN_FILES)}; "
        f"it is not quantized: {REQUANTIZE}"
    )


def _method(path: Path, table: Mapping[str, Any]) -> Literal["awq", "gptq"]:
    is_awq = path.name == "quant_config.json" or "w_bit" in table
    method = _lower(table.get("quant_method", "awq" if is_awq else "gptq"))
    if method == "awq":
        return "awq"
    if method == "gptq":
        return "gptq"
    raise CheckpointError(
        f"{path} says quant_method {method!r}, edge_rt imports 'awq' and 'gptq'; {REQUANTIZE}"
    )


def _layout(path: Path, table: Mapping[str, Any], method: str) -> str:
    known, keys, remedy = _LAYOUTS[method]
    named = [table[key] for key in keys if table.get(key) is not None]
    if table.get("is_marlin_format"):
        named = ["marlin"]
    layout = _lower(named[0]) if named else known[0]
    if layout not in known:
        raise CheckpointError(
            f"{path} says the {method} layout {layout!r}, edge_rt imports "
            f"{' and '.join(map(repr, known))}; {remedy}, or {REQUANTIZE}"
        )
    return str(layout)


def _group_size(path: Path, table: Mapping[str, Any]) -> int | None:
    size = table.get("group_size", table.get("q_group_size", -1))
    if type(size) is int and size == -1:
        return None
    if type(size) is not int or size < 32 or size % 32:
        raise CheckpointError(
            f"{path} says group_size {size!r}, edge_rt imports -1 and multiples of 32; make the "
            f"checkpoint with group_size 128, or {REQUANTIZE}"
        )
    return size


def _by_gptqmodel(table: Mapping[str, Any]) -> bool:
    meta = table.get("meta")
    writers = meta.get("quantizer") if isinstance(meta, dict) else None
    return any(
        str(writer).lower().startswith("gptqmodel")
        for writer in (writers if isinstance(writers, list) else [writers])
    )


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value
