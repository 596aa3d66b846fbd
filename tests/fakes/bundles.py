"""Bundles of the null engine."""

from __future__ import annotations

from pathlib import Path

from edge_rt.build.bundle import build


def slow_bundle(quantized: Path, directory: Path, *, max_batch: int, step_ms: int) -> Path:
    """One that serves `max_batch` requests at a time and takes `step_ms` for each step."""
    recipe = directory / "slow.toml"
    recipe.write_text(f'engine = "null"\nmax_batch = {max_batch}\n[null]\nstep_ms = {step_ms}.0\n')
    build(quantized, str(recipe), directory / "bundle")
    return directory / "bundle"
