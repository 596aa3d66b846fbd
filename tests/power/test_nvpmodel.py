"""The power mode's name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fakes.board_tools import add_tool
from fakes.board_trees import NVPMODEL_AGX

from edge_rt.power import nvpmodel
from edge_rt.power.nodes import Nodes
from edge_rt.power.nvpmodel import PowerMode, mode_names, parse_query
from edge_rt.power.watch import Watch


def test_names_by_number() -> None:
    names = {0: "MAXN", 1: "MODE_15W", 2: "MODE_30W", 3: "MODE_50W"}
    assert mode_names(NVPMODEL_AGX) == names


@pytest.mark.parametrize("name", ["MAXN_SUPER", "40W+", "MODE_C-8.1", "7W_ü"])
def test_bug_672_any_name_is_a_name(name: str) -> None:
    assert mode_names(f"  <  POWER_MODEL ID=12  NAME={name} >\n") == {12: name}
    assert parse_query(f"NV Power Mode: {name}\n12\n") == name


def test_bug_148_warnings_are_not_the_mode() -> None:
    warned = "NVPM WARN: fan mode is not set!\nNV Power Mode: MODE_30W\n2\n"
    assert parse_query(warned) == "MODE_30W"
    assert parse_query("NV Fan Mode:cool\nNV Power Mode: MODE_30W_4CORE\n5\n") == "MODE_30W_4CORE"


@pytest.mark.parametrize("output", ["", "NVPM ERROR: no\n", "NV Power Mode:\n2\n", "\ufffd"])
def test_bug_567_no_mode_is_unknown(output: str) -> None:
    assert parse_query(output) is None


def mode(root: Path) -> tuple[str | None, dict[str, str]]:
    source, lost = PowerMode(Nodes(str(root), Watch())), {}
    source.find()
    return source.read(lost), lost


def write(root: Path, status: str, configuration: str = NVPMODEL_AGX) -> None:
    for path, held in (
        (nvpmodel.STATUS, status),
        ("etc/nvpmodel/a.conf", configuration),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(held)
    (root / "etc/nvpmodel.conf").symlink_to("/etc/nvpmodel/a.conf")  # absolute, as on the boards


def test_the_tools_own_files_say_it(tmp_path: Path) -> None:
    write(tmp_path, "pmode:0003 fmode:quiet\n")
    assert mode(tmp_path) == ("MODE_50W", {})


def test_a_mode_that_has_no_name(tmp_path: Path) -> None:
    write(tmp_path, "pmode:0009\n")
    assert mode(tmp_path) == (None, {"power_mode": "etc/nvpmodel.conf: no name for mode 9"})


def test_a_container_does_not_see_them(tmp_path: Path) -> None:
    assert mode(tmp_path) == (None, {})


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(nvpmodel, "STATUS", "nowhere/status")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_the_tool_is_asked_and_not_waited_for(tools: Path) -> None:
    add_tool(
        tools,
        "nvpmodel",
        f'until [ -e {tools}/go ]; do sleep 0.05; done\necho "NV Power Mode: $1"; echo 2',
    )
    source, lost = PowerMode(Nodes("/", Watch())), {}
    assert source.read(lost) is None
    (tools / "go").touch()
    deadline = time.monotonic() + 20
    while (name := source.read(lost)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (name, lost) == ("-q", {})
    source.close()


def test_a_tool_that_hangs_is_ended(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvpmodel, "QUERY_LIMIT_S", 0.0)
    add_tool(tools, "nvpmodel", "exec sleep 60")
    source = PowerMode(Nodes("/", Watch()))
    source.read({})
    assert source._query is not None
    child = source._query._child
    assert child is not None
    assert source.read({}) is None
    assert child.poll() is not None


def test_close_ends_the_tool(tools: Path) -> None:
    add_tool(tools, "nvpmodel", "exec sleep 60")
    source = PowerMode(Nodes("/", Watch()))
    source.read({})
    assert source._query is not None
    child = source._query._child
    source.close()
    assert child is not None
    assert child.poll() is not None
