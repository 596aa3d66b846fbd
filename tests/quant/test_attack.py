"""What an attack on the finished quantizer found: each of these once failed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_rt.errors import ConfigError
from edge_rt.model.checkpoint import Checkpoint
from edge_rt.quant import pipeline, store
from edge_rt.quant.pipeline import LayerRun, quantize


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture
def cut_short(
    random_gptj: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, int], tuple[Path, Path]]:
    """A run of a recipe that failed behind some layers: the checkpoint and what is left."""

    def run(recipe: str, layers: int) -> tuple[Path, Path]:
        source = random_gptj(64, 2, 16)

        def stop(run: LayerRun) -> None:
            if run.index == layers - 1:
                raise OSError(28, "No space left on device")

        with pytest.raises(ConfigError, match="kept"):
            quantize(source, tmp_path / "q", recipe, watch=stop)
        (left,) = tmp_path.glob(".q.unfinished-*")
        return source, left

    return run


def test_random_channels_are_the_same_after_a_resume(
    cut_short: Callable[[str, int], tuple[Path, Path]], recipe: Callable[..., str], tmp_path: Path
) -> None:
    text = Path(recipe("rtn"))
    text.write_text('salient = "random"\n' + text.read_text())
    source, _ = cut_short(str(text), 1)
    quantize(source, tmp_path / "q", str(text))
    quantize(source, tmp_path / "whole", str(text))
    assert contents(tmp_path / "q") == contents(tmp_path / "whole")


@pytest.mark.parametrize("how", ["empty", "truncated", "altered", "another layer"])
def test_a_damaged_layer_is_made_again(
    cut_short: Callable[[str, int], tuple[Path, Path]],
    recipe: Callable[..., str],
    tmp_path: Path,
    how: str,
) -> None:
    source, left = cut_short(recipe("gptq"), 2)
    first, second = (left / f"layer.00{index}.safetensors" for index in range(2))
    data = bytearray(first.read_bytes())
    if how == "empty":
        data.clear()
    elif how == "truncated":
        del data[len(data) // 2 :]
    elif how == "altered":
        data[-3000] ^= 0xFF
    else:
        data[:] = second.read_bytes()
    first.write_bytes(data)
    runs: list[LayerRun] = []
    quantize(source, tmp_path / "q", recipe("gptq"), watch=runs.append)
    assert [run.resumed for run in runs] == [False, True, False]
    quantize(source, tmp_path / "whole", recipe("gptq"))
    assert contents(tmp_path / "q") == contents(tmp_path / "whole")
    assert store.has_layer(tmp_path / "q", 0)


@pytest.mark.parametrize(("out", "why"), [("/", "root"), (os.fsdecode(b"\xff"), "not UTF-8")])
def test_an_impossible_out_is_refused_before_the_work(tmp_path: Path, out: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        quantize(tmp_path / "none", tmp_path / out, "int4")


@pytest.mark.parametrize("name", ["pipe", "a\0b"])
def test_a_calibration_text_that_is_no_file(
    random_gptj: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    source = random_gptj(64, 2, 16)
    config = Checkpoint.open(source).config
    with pytest.raises(ConfigError, match="calibration text"):
        pipeline.text_tokens(tmp_path / name, source, config)
