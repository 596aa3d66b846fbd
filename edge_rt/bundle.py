"""The bundle: a directory that holds all that an engine needs to run, described by a manifest.

It is the only thing that crosses from build to run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import edge_rt
from edge_rt import config
from edge_rt.core import Limits
from edge_rt.errors import BundleError, ConfigError
from edge_rt.recipes import EngineRecipe
from edge_rt.storage import (
    FileEntry,
    check_files,
    check_names,
    list_files,
    read_json,
    write_json,
)

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1

_REBUILD = "rebuild the bundle with edge-rt build"
_PIP = f"{sys.executable} -m pip"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model's sizes, as far as the run side needs them."""

    architecture: str
    n_layer: int
    n_head: int
    head_size: int
    vocab_size: int
    n_positions: int
    eos_token_id: int | None

    def __post_init__(self) -> None:
        sizes = (self.n_layer, self.n_head, self.head_size, self.vocab_size, self.n_positions)
        if min(sizes) < 1:
            raise ConfigError(f"a model has no size below 1, found {min(sizes)}")


@dataclass(frozen=True, slots=True)
class QuantizationSummary:
    """How the weights came to be; group_size and calibration are None where there was none."""

    recipe: str
    method: str
    bits: int
    group_size: int | None
    fp16_fraction: float
    calibration_sha256: str | None


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far the engine's logits may lie from the golden ones; KL divergence in nats."""

    max_abs_logit_diff: float
    mean_kl: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle holds, how it was made and what it needs.

    `libraries` are the oldest versions that can run it; `tolerance` is that of its golden logits,
    None for an engine that computes none; `files` are paths within the bundle.
    """

    model: ModelInfo
    recipe: EngineRecipe
    quantization: QuantizationSummary
    libraries: dict[str, str]
    tolerance: Tolerance | None
    edge_rt_version: str
    created_utc: str
    files: dict[str, FileEntry]
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if (self.recipe.engine == "null") != (self.tolerance is None):
            raise ConfigError(
                f"engine '{self.recipe.engine}' and tolerance {self.tolerance} do not go together"
            )
        wanted, trained = self.recipe.max_context, self.model.n_positions
        if wanted is not None and wanted > trained:
            raise ConfigError(
                f"recipe.max_context is {wanted}, but the model was trained for {trained} tokens; "
                f"lower it in the engine recipe"
            )
        check_names(self.files)

    def limits(self) -> Limits:
        """What an engine with one buffer per row holds: a page is a whole context."""
        context = self.recipe.max_context or self.model.n_positions
        return Limits(
            max_requests=self.recipe.max_batch,
            max_rows=self.recipe.rows,
            max_tokens_per_step=self.recipe.max_tokens_per_step,
            prefill_chunk=self.recipe.prefill_chunk,
            pages=self.recipe.rows,
            page_tokens=context,
            max_context=context,
            vocab_size=self.model.vocab_size,
        )


def write_manifest(
    directory: Path,
    *,
    model: ModelInfo,
    recipe: EngineRecipe,
    quantization: QuantizationSummary,
    libraries: Mapping[str, str],
    tolerance: Tolerance | None = None,
) -> Manifest:
    """Describe a finished directory: hash every file in it and write manifest.json.

    ConfigError if recipe and model do not fit each other.
    """
    manifest = Manifest(
        model=model,
        recipe=recipe,
        quantization=quantization,
        libraries=dict(libraries),
        tolerance=tolerance,
        edge_rt_version=edge_rt.__version__,
        created_utc=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        files={name: entry for name, entry in list_files(directory).items() if name != MANIFEST},
    )
    write_json(directory / MANIFEST, asdict(manifest))
    return manifest


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle whose manifest has been read and makes sense."""

    path: Path
    manifest: Manifest

    @classmethod
    def load(cls, path: Path) -> Bundle:
        """Read the manifest; BundleError says what is wrong. The files are not read."""
        file = path / MANIFEST
        if not file.is_file():
            found = f"has no {MANIFEST}" if path.is_dir() else "is not a directory"
            raise BundleError(f"{path} is no bundle: it {found}; make one with edge-rt build")
        table = read_json(file, BundleError)
        version = table.get("schema_version")
        if version != SCHEMA_VERSION:
            raise BundleError(
                f"{file} has schema version {version}, this edge_rt reads {SCHEMA_VERSION}; "
                f"{_REBUILD}"
            )
        try:
            return cls(path, config.from_table(Manifest, table, str(file)))
        except ConfigError as error:
            raise BundleError(f"{error}; {_REBUILD}") from error

    def check_files(self, *, hashes: bool = True) -> None:
        """Compare every file with the manifest; BundleError names the first that differs."""
        check_files(self.path, self.manifest.files, BundleError, _REBUILD, hashes=hashes)

    def check_libraries(self, installed: Mapping[str, str]) -> None:
        """BundleError for a library that is missing or older than it needs."""
        for library, needed in self.manifest.libraries.items():
            found = installed.get(library)
            if found is None:
                raise BundleError(
                    f"the bundle needs {library} {needed} or newer, which is not installed here; "
                    f"install it: {_PIP} install '{library}>={needed}'"
                )
            if _release(found) < _release(needed):
                raise BundleError(
                    f"the bundle needs {library} {needed} or newer, but {found} is installed; "
                    f"upgrade it: {_PIP} install '{library}>={needed}'"
                )


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)+", version)
    if match is None:
        raise BundleError(f"'{version}' is not a version number; {_REBUILD}")
    return tuple(int(part) for part in match[0].split("."))
