"""Golden logits: what the float32 reference says to fixed prompts, for engines to be judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from edge_rt.errors import BundleError

GOLDEN_FILE = "golden.safetensors"


@dataclass(frozen=True, slots=True)
class GoldenPrompt:
    """`tokens` int32 [T]; `logits` float32 [T - start, vocab], those of positions start to T-1."""

    tokens: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32]

    @property
    def start(self) -> int:
        """The first position whose logits are kept."""
        return len(self.tokens) - len(self.logits)


@dataclass(frozen=True, slots=True)
class Golden:
    """The prompts of one model, at least one; stored as `tokens.{i}` and `logits.{i}`."""

    prompts: tuple[GoldenPrompt, ...]

    @classmethod
    def save(cls, path: Path, prompts: Sequence[GoldenPrompt]) -> Golden:
        """Write prompts that fit together; BundleError says which does not."""
        golden = cls(tuple(prompts))
        golden._check(path)
        tensors: dict[str, npt.NDArray[Any]] = {}
        for i, prompt in enumerate(prompts):
            tensors[f"tokens.{i}"] = np.ascontiguousarray(prompt.tokens)
            tensors[f"logits.{i}"] = np.ascontiguousarray(prompt.logits)
        path.write_bytes(save(tensors))
        return golden

    @classmethod
    def load(cls, path: Path) -> Golden:
        """Read and check; BundleError says what is wrong."""
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise BundleError(
                f"{path} cannot be read ({error}); quantize and build again"
            ) from error
        indices = range(len(tensors) // 2)
        if set(tensors) != {f"{kind}.{i}" for kind in ("tokens", "logits") for i in indices}:
            raise BundleError(
                f"{path} holds {', '.join(sorted(tensors))}, expected tokens.N and logits.N "
                f"for N = 0, 1, …; quantize and build again"
            )
        golden = cls(
            tuple(GoldenPrompt(tensors[f"tokens.{i}"], tensors[f"logits.{i}"]) for i in indices)
        )
        golden._check(path)
        return golden

    def _check(self, path: Path) -> None:
        if not self.prompts:
            raise BundleError(f"{path}: expected at least one golden prompt, found none")
        for i, prompt in enumerate(self.prompts):
            fault = _fault(prompt)
            if fault:
                raise BundleError(f"{path}: golden prompt {i}: {fault}")
        widths = sorted({prompt.logits.shape[1] for prompt in self.prompts})
        if len(widths) > 1:
            raise BundleError(f"{path}: logits have {widths} columns, expected one vocabulary size")


def _fault(prompt: GoldenPrompt) -> str | None:
    tokens, logits = prompt.tokens, prompt.logits
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        return f"tokens are {tokens.dtype} {list(tokens.shape)}, expected int32 [T]"
    if logits.dtype != np.float32 or logits.ndim != 2 or not 1 <= len(logits) <= len(tokens):
        return (
            f"logits are {logits.dtype} {list(logits.shape)}, expected float32 "
            f"[1 to {len(tokens)}, vocab]"
        )
    if tokens.min() < 0 or tokens.max() >= logits.shape[1]:
        return f"tokens are {tokens.min()} to {tokens.max()}, expected 0 to {logits.shape[1] - 1}"
    if not np.isfinite(logits).all():
        return "logits are not finite"
    return None
