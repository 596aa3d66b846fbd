"""The wheel, alone in an empty environment, finds its recipes and checkpoint and does its work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `edge-rt` script of a new environment that holds nothing but the wheel and its needs."""
    work = tmp_path_factory.mktemp("packaging")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(work), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = work.glob("*.whl")
    venv.create(work / "venv", with_pip=True)
    pip = [work / "venv/bin/pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"{wheel}[ort]"], check=True, capture_output=True)
    return work / "venv/bin/edge-rt"


def run(script: Path, cwd: Path, *arguments: str) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["XDG_CACHE_HOME"] = str(cwd)
    done = subprocess.run(
        [script, *arguments, "--json"],
        check=False,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    table: dict[str, Any] = json.loads(done.stdout)
    return table


@pytest.mark.slow
def test_doctor_and_demo_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    doctor = run(installed, tmp_path, "doctor")
    assert doctor["problems"] == []
    assert {"demo.cpu", "demo.null"} <= set(doctor["recipes_engines"])
    demo = run(installed, tmp_path, "demo")
    assert demo["golden"]["mean_kl"] < 0.002
    assert len(demo["completions"]) == 4
    assert demo["bench"]["offline"]["throughput_tok_s"] > 0
    assert (tmp_path / "edge-rt/demo.bundle/manifest.json").is_file()
    assert run(installed, tmp_path, "verify", demo["bundle"])["engine"] == "ort"


@pytest.mark.slow
def test_the_wheel_is_small_and_needs_neither_torch_nor_transformers(installed: Path) -> None:
    pip = installed.with_name("pip")
    listed = subprocess.run([pip, "list", "--format=json"], check=True, capture_output=True)
    size = sum(path.lstat().st_size for path in installed.parents[1].rglob("*"))
    assert size < 500e6
    names = {package["name"] for package in json.loads(listed.stdout)}
    assert not names & {"torch", "transformers"}
