"""What the tests of packed checkpoints share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.packed import Make, Packed, build


@pytest.fixture(scope="module")
def origin_of(random_gptj: Callable[..., Path]) -> Callable[..., Path]:
    """As random_gptj, made once for the same sizes; not to be written to."""
    return functools.cache(random_gptj)


@pytest.fixture
def make(tmp_path: Path, origin_of: Callable[..., Path]) -> Make:
    """A random GPT-J of two layers, packed by `kind`; nothing is written yet."""

    def made(
        kind: str, group: int = 32, sizes: tuple[Any, ...] = (64, 2, 16), origin: Path | None = None
    ) -> Packed:
        return build(tmp_path, origin or origin_of(*sizes), kind, group)

    return made
