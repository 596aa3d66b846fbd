"""Recipes by name: engine recipes in engines/, quantization recipes in calib/.

In an installed wheel both folders lie in `edge_rt/_data`; in a checkout beside the package.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edge_rt import config
from edge_rt.errors import ConfigError

Kind = Literal["engines", "calib"]

MAX_BATCH = 16
MAX_ROWS = 64
MAX_THREADS = 1024
MAX_MODELLED_MS = 60_000.0


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class OrtOptions:
    """ONNX Runtime engine.

    `accuracy_level` 0 multiplies in float32; 4 quantizes activations to int8 in blocks, which is
    faster. At level 4 with `block_size` 32 a row's result is the same bits in any batch.
    `head_bits` 8 rounds the vocabulary's weights to 8 bits in blocks, and at level 4 what they are
    multiplied with; 16 takes both in float32. None is 8 at level 4, 16 at level 0. `threads` 0
    takes every core; with `spinning` they burn it while they wait for work, which is faster where
    nothing else needs it.
    """

    accuracy_level: Literal[0, 4] = 4
    block_size: Literal[32, 64, 128] = 32
    head_bits: Literal[8, 16] | None = None
    threads: int = 0
    spinning: bool = False

    def __post_init__(self) -> None:
        _require(
            0 <= self.threads <= MAX_THREADS,
            f"threads must be 0 (all cores) to {MAX_THREADS}, found {self.threads}",
        )

    @property
    def is_float(self) -> bool:
        """Whether all products are in float32."""
        return self.accuracy_level == 0 and not self.rounds_head

    @property
    def rounds_head(self) -> bool:
        """Whether the head's weights are rounded to 8 bits."""
        return self.accuracy_level == 4 if self.head_bits is None else self.head_bits == 8


@dataclass(frozen=True, slots=True)
class NullOptions:
    """The engine that computes nothing: a call takes `step_ms` plus `row_ms` for each row."""

    step_ms: float = 0.0
    row_ms: float = 0.0

    def __post_init__(self) -> None:
        _require(self.step_ms >= 0 and self.row_ms >= 0, "step_ms and row_ms must not be negative")
        _require(
            max(self.step_ms, self.row_ms) <= MAX_MODELLED_MS,
            f"step_ms and row_ms must be at most {MAX_MODELLED_MS:g}",
        )


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """How a bundle is built and how much it serves at once; one file in engines/ each.

    `max_batch` counts requests, `max_rows` their continuations (None: as many as requests).
    """

    engine: Literal["ort", "null"]
    max_batch: int = 8
    max_rows: int | None = None
    max_context: int | None = None  # None: what the model was trained for
    prefill_chunk: int = 64
    max_tokens_per_step: int = 256
    ort: OrtOptions = field(default_factory=OrtOptions)
    null: NullOptions = field(default_factory=NullOptions)

    def __post_init__(self) -> None:
        _require(
            1 <= self.max_batch <= MAX_BATCH,
            f"max_batch must be 1 to {MAX_BATCH} requests, found {self.max_batch}",
        )
        _require(
            self.max_batch <= self.rows <= MAX_ROWS,
            f"max_rows must be max_batch ({self.max_batch}) to {MAX_ROWS}, found {self.rows}",
        )
        _require(
            self.max_context is None or self.max_context >= 2,
            f"max_context must be 2 tokens or more, found {self.max_context}",
        )
        _require(
            self.prefill_chunk >= 1, f"prefill_chunk must be 1 or more, found {self.prefill_chunk}"
        )
        # Else a new prompt would wait for as long as a full batch decodes.
        _require(
            self.max_tokens_per_step >= self.prefill_chunk + self.rows,
            f"max_tokens_per_step must be at least prefill_chunk + max_rows "
            f"({self.prefill_chunk + self.rows}), found {self.max_tokens_per_step}",
        )

    @property
    def rows(self) -> int:
        """Continuations at once."""
        return self.max_batch if self.max_rows is None else self.max_rows


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Which text is shown to the model, and how much of it: `sequences` of `tokens` each.

    `seed` draws the sequences from the text, and whatever else is random.
    """

    text: str = "calibration.txt"
    sequences: int = 128
    tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        _require(
            self.sequences >= 1 and self.tokens >= 2,
            f"calibration needs at least 1 sequence of 2 tokens, found {self.sequences} of "
            f"{self.tokens}",
        )
        _require(self.seed >= 0, f"calibration.seed must be 0 or more, found {self.seed}")


@dataclass(frozen=True, slots=True)
class QuantRecipe:
    """How a checkpoint is quantized; one file in calib/ each.

    `method` rounds to nearest (rtn), or each channel for what the others' errors leave, towards
    weights that also make up for the layers before, with corrected biases and head (gptq); float
    keeps every weight. `awq` scales channels by their activations before. `salient` says
    which channels stay in FP16: those of largest activations, or, to compare with, those of
    largest weights or random ones.
    """

    method: Literal["gptq", "rtn", "float"] = "gptq"
    awq: bool = True
    group_size: Literal[32, 64, 128] = 128
    outlier_fraction: float = 0.01
    salient: Literal["activation", "weight", "random"] = "activation"
    calibration: CalibrationText = field(default_factory=CalibrationText)

    def __post_init__(self) -> None:
        _require(
            0.0 <= self.outlier_fraction <= 0.5,
            f"outlier_fraction must be 0 to 0.5, found {self.outlier_fraction}",
        )


def data_dir(kind: Kind) -> Path:
    """The folder of shipped recipes and data: in the wheel, else in the checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_data" / kind, package.parent / kind):
        if folder.is_dir():
            return folder
    raise ConfigError(f"this installation has no {kind}/ folder; reinstall edge-rt")


def names(kind: Kind) -> list[str]:
    """The recipes that this installation ships."""
    return sorted(path.name.removesuffix(".toml") for path in data_dir(kind).glob("*.toml"))


def find(kind: Kind, name_or_file: str) -> Path:
    """A recipe's file: a shipped name, or the path of a .toml file."""
    as_path = Path(name_or_file)
    if as_path.suffix == ".toml":
        if as_path.is_file():
            return as_path
        raise ConfigError(f"recipe file {as_path} does not exist")
    if as_path.is_file():
        raise ConfigError(f"{as_path} is a file, but recipes end in .toml; rename it")
    if name_or_file in names(kind):
        return data_dir(kind) / f"{name_or_file}.toml"
    match = difflib.get_close_matches(name_or_file, names(kind), n=1)
    hint = f"; did you mean '{match[0]}'?" if match else ""
    other: Kind = "calib" if kind == "engines" else "engines"
    if name_or_file in names(other):
        command = "quantize" if other == "calib" else "build"
        hint = f": that is a recipe of edge-rt {command}"
    raise ConfigError(
        f"no recipe '{name_or_file}'{hint} (shipped: {', '.join(names(kind))}; "
        f"or give the path of a .toml file)"
    )


def engine(name_or_file: str) -> EngineRecipe:
    """Load an engine recipe."""
    return config.load(EngineRecipe, find("engines", name_or_file))


def quantization(name_or_file: str) -> tuple[QuantRecipe, Path]:
    """Load a quantization recipe and find its calibration text: beside it, else the shipped one."""
    path = find("calib", name_or_file)
    recipe = config.load(QuantRecipe, path)
    beside, shipped = (
        folder / recipe.calibration.text for folder in (path.parent, data_dir("calib"))
    )
    return recipe, shipped if shipped.is_file() and not beside.is_file() else beside
