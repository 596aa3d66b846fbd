"""What several rooms' tests need: the demo checkpoint, its quantized form and its bundles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edge_rt.build.bundle import build
from edge_rt.quant.pipeline import quantize
from edge_rt.recipes import data_dir

SMALL_RECIPE = """\
method = "{method}"
group_size = {group_size}
outlier_fraction = 0.01

[calibration]
text = "{text}"
sequences = 8
tokens = 128
"""


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    return data_dir("engines") / "demo"


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As int4-salient, with less calibration text."""
    path = tmp_path_factory.mktemp("recipe") / "small.toml"
    text = data_dir("calib") / "calibration.txt"
    path.write_text(SMALL_RECIPE.format(method="rtn", group_size=128, text=text))
    return path


@pytest.fixture(scope="session")
def demo_quantized(
    demo_checkpoint: Path, small_recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("demo") / "quantized"
    quantize(demo_checkpoint, out, str(small_recipe))
    return out


@pytest.fixture(scope="session")
def demo_bundle(
    demo_quantized: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The demo's bundle for an engine recipe, built once a session; not to be written to."""
    made: dict[str, Path] = {}

    def bundle(recipe: str) -> Path:
        if recipe not in made:
            made[recipe] = tmp_path_factory.mktemp("bundle") / recipe
            build(demo_quantized, recipe, made[recipe])
        return made[recipe]

    return bundle
