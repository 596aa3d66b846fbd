"""A captured board reads as the board did, and names nobody."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from fakes.board_tools import JETPACK6, add_tool
from fakes.board_trees import BOARDS, SERIAL, jetpack6

from edge_rt.core import BoardInfo, BoardReading
from edge_rt.power.board import open_board
from edge_rt.power.settings import BoardSettings

Tool = Callable[[str], ModuleType]
SCRIPT = Path(__file__).parents[2] / "tools/capture_board.py"


@pytest.fixture(autouse=True)
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


def read(root: Path) -> tuple[BoardInfo, BoardReading]:
    board = open_board(BoardSettings(root=str(root)))
    reading = board.read()
    board.close()
    return board.info, replace(reading, taken_ns=0)


@pytest.mark.parametrize("name", BOARDS)
def test_it_reads_the_same(name: str, tool: Tool, tmp_path: Path) -> None:
    root = BOARDS[name]().write(tmp_path / "root")
    taken = tool("capture_board").capture(root, tmp_path / "tree")
    info, reading = read(root)
    assert read(tmp_path / "tree") == (replace(info, serial="0" * len(SERIAL)), reading)
    assert reading.lost == {}
    assert taken.failed == {}


def test_it_takes_what_is_read_and_nothing_else(tool: Tool, tmp_path: Path) -> None:
    root = jetpack6().write(tmp_path / "root")
    (root / "etc/hostname").write_text("my-secret-board\n")
    tool("capture_board").capture(root, tmp_path / "tree")
    files = [path for path in (tmp_path / "tree").rglob("*") if path.is_file()]
    held = b"".join(path.read_bytes() for path in files)
    assert SERIAL.encode() not in held
    assert b"my-secret-board" not in held
    assert not [path for path in files if path.name in {"hostname", "governor", "curr1_crit"}]


def test_links_stay_links_inside_the_tree(tool: Tool, tmp_path: Path) -> None:
    root = jetpack6().write(tmp_path / "root")
    conf = root / "etc/nvpmodel.conf"
    conf.unlink()
    conf.symlink_to("/etc/nvpmodel/nvpmodel_p3701_0000.conf")
    tree = tmp_path / "tree"
    tool("capture_board").capture(root, tree)
    links = [path for path in tree.rglob("*") if path.is_symlink()]
    assert {"nvpmodel.conf", "hwmon2", "thermal_zone0", "17000000.gpu"} <= {p.name for p in links}
    assert all(path.resolve().is_relative_to(tree) for path in links)
    assert all(path.exists() for path in links)
    assert read(tree)[1].power_mode == "MODE_30W"


def test_a_node_that_cannot_be_read_is_named(tool: Tool, tmp_path: Path) -> None:
    root = jetpack6().write(tmp_path / "root")
    zone = root / "sys/devices/virtual/thermal/thermal_zone3/temp"
    zone.unlink()
    zone.mkdir()
    taken = tool("capture_board").capture(root, tmp_path / "tree")
    assert taken.failed == {"sys/class/thermal/thermal_zone3/temp": "Is a directory"}
    assert "thermal_zone3/temp: Is a dir" in (tmp_path / "tree/CAPTURE.txt").read_text()


def test_what_tools_print_is_taken(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tool("capture_board")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(module, "OUTPUT_S", 0.5)
    add_tool(tmp_path / "bin", "tegrastats", f"echo '{JETPACK6}'; exec sleep 60")
    taken = module.Capture(Path("/"), tmp_path)
    for name, command in module.OUTPUTS.items():
        taken.output(name, command)
    assert (tmp_path / "tegrastats.txt").read_text() == f"{JETPACK6}\n"
    assert set(taken.failed) == {"nvpmodel -q"}


def test_the_script_makes_an_archive(tmp_path: Path) -> None:
    root = jetpack6().write(tmp_path / "root")
    out = tmp_path / "board.tar.gz"
    command = [sys.executable, str(SCRIPT), str(out), "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "the serial number is zeros" in done.stdout
    with tarfile.open(out) as archive:
        archive.extractall(tmp_path / "out", filter="data")
        assert {entry.uname for entry in archive.getmembers()} == {""}
    assert read(tmp_path / "out/board")[1] == read(root)[1]
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "is there already" in again.stderr
    for wrong in ([str(tmp_path / "no/x.tgz")], [str(tmp_path / "x"), "--root", "/no"]):
        done = subprocess.run([*command[:2], *wrong], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "is no directory" in done.stderr
