"""A run that is cut short goes on from its last finished layer, and ends with the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_rt.errors import ConfigError
from edge_rt.quant import pipeline, store
from edge_rt.quant.pipeline import LayerRun, quantize

# A run that dies by SIGKILL: behind its first layer, or while it writes its second.
KILLED = """
import os, signal, sys
from pathlib import Path
from edge_rt import storage
from edge_rt.quant import pipeline

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


if sys.argv[4] == "writing":
    os_rename, os_replace = os.rename, os.replace
    def guard(call):
        def dying(source, target, *rest, **named):
            if Path(target).name == "layer.001.safetensors":
                die()
            return call(source, target, *rest, **named)
        return dying
    os.rename, os.replace = guard(os_rename), guard(os_replace)

watch = die if sys.argv[4] == "between" else lambda run: None
pipeline.quantize(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], watch=watch)
"""


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("moment", ["between", "writing"])
def test_a_killed_run_goes_on(
    random_gptj: Callable[..., Path], recipe: Callable[..., str], tmp_path: Path, moment: str
) -> None:
    source, text = random_gptj(64, 2, 16), recipe("gptq", awq="true")
    quantize(source, tmp_path / "whole", text)
    out = tmp_path / "q"
    command = [sys.executable, "-c", KILLED, str(source), str(out), text, moment]
    killed = subprocess.run(command, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not out.exists()
    (partial,) = tmp_path.glob(".q.unfinished-*")
    (partial / "layer.007.safetensors").write_bytes(b"a stranger's")
    (partial / "decoder.onnx").mkdir()
    runs: list[LayerRun] = []
    quantize(source, out, text, watch=runs.append)
    assert [run.resumed for run in runs] == [True, False, False]
    assert contents(out) == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".q*"))


def test_another_job_does_not_go_on_from_it(
    random_gptj: Callable[..., Path], recipe: Callable[..., str], tmp_path: Path
) -> None:
    source, out = random_gptj(64, 2, 16), tmp_path / "q"
    command = [sys.executable, "-c", KILLED, str(source), str(out), recipe("gptq"), "between"]
    subprocess.run(command, check=False, capture_output=True)
    assert len(list(tmp_path.glob(".q*"))) == 1
    runs: list[LayerRun] = []
    quantize(source, out, recipe("rtn"), watch=runs.append)
    assert not any(run.resumed for run in runs)
    assert len(list(tmp_path.glob(".q*"))) == 1, "hours of work may be in it"


def test_a_changed_checkpoint_is_another_job(
    random_gptj: Callable[..., Path], recipe: Callable[..., str], tmp_path: Path
) -> None:
    source, out = random_gptj(64, 2, 16), tmp_path / "q"
    command = [sys.executable, "-c", KILLED, str(source), str(out), recipe("gptq"), "between"]
    subprocess.run(command, check=False, capture_output=True)
    weights = source / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    runs: list[LayerRun] = []
    quantize(source, out, recipe("gptq"), watch=runs.append)
    assert not any(run.resumed for run in runs)


def test_a_full_disk_says_that_the_command_goes_on(
    random_gptj: Callable[..., Path],
    recipe: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, out, text = random_gptj(64, 2, 16), tmp_path / "q", recipe("gptq")

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pipeline.store, "save_outer", full)
        with pytest.raises(ConfigError, match=r"No space left.*the same command goes on from"):
            quantize(source, out, text)
    runs: list[LayerRun] = []
    quantize(source, out, text, watch=runs.append)
    assert [run.resumed for run in runs] == [True, True, False]
    store.QuantizedCheckpoint.open(out).check_files()


def test_each_layer_reports_its_memory(
    random_gptj: Callable[..., Path], recipe: Callable[..., str], tmp_path: Path
) -> None:
    runs: list[LayerRun] = []
    quantize(random_gptj(64, 2, 16), tmp_path / "q", recipe("gptq"), watch=runs.append)
    assert [run.index for run in runs] == [0, 1, None]
    for run in runs:
        assert 20e6 < run.peak_rss_bytes < 20e9
        assert run.duration_s > 0


def test_the_seed_decides(
    random_gptj: Callable[..., Path], recipe: Callable[..., str], tmp_path: Path
) -> None:
    source, text = random_gptj(64, 2, 16), recipe("gptq")
    quantize(source, tmp_path / "a", text)
    content = Path(text).read_text()
    Path(text).write_text(content + "seed = 1\n")
    quantize(source, tmp_path / "b", text)
    files = [(tmp_path / name / "layer.000.safetensors").read_bytes() for name in "ab"]
    assert files[0] != files[1]
