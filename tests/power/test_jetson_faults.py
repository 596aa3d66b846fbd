"""A Jetson's readers with each node broken in turn: it costs its own value, and is named."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.board_nodes import Recorder, fail_nodes, metrics_of, read_nodes, values
from fakes.board_trees import BOARDS, jetpack6

from edge_rt.power.board import Board, open_board
from edge_rt.power.settings import BoardSettings
from edge_rt.power.watch import Watch


@pytest.fixture(autouse=True)
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are read alike where the tests' machine is a Jetson."""
    monkeypatch.setenv("PATH", "")


def opened(root: Path, watch: Watch | None = None) -> Board:
    return open_board(BoardSettings(root=str(root)), watch)


@contextlib.contextmanager
def spoiled(file: Path, fault: str) -> Iterator[None]:
    """A node as it is after a fault; then as it was."""
    held = {"garbage": b"\xff\xfe?\n", "empty": b"", "negative": b"-1600000\n"}
    held |= {"huge": b"9" * 100_000, "absurd": b"9223372036854775794\n"}
    aside = file.rename(file.with_name("aside"))
    if fault == "a directory":
        file.mkdir()
    elif fault != "removed":
        file.write_bytes(held[fault])
    yield
    if fault == "a directory":
        file.rmdir()
    aside.replace(file)


FAULTS = ("removed", "a directory", "garbage", "empty", "negative", "huge", "absurd")


@pytest.mark.parametrize("fault", [*FAULTS, "EIO"])
@pytest.mark.parametrize("name", BOARDS)
def test_a_node_that_fails_costs_its_own_value(
    name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = BOARDS[name]().write(tmp_path)
    failing: set[str] = set()
    if fault == "EIO":
        fail_nodes(monkeypatch, failing, errno.EIO)
    paths = read_nodes(root)
    assert len(paths) >= 7
    for path in paths:
        if fault == "absurd" and path.endswith("_event_cnt"):
            continue  # a counter may have any value
        affected = metrics_of(path, root)
        board = opened(root)
        before = values(board.read())
        if fault == "EIO":
            failing.add(str(root / path))
            reading = board.read()
            failing.clear()
        else:
            with spoiled(root / path, fault):
                reading = board.read()
        assert set(reading.lost) == affected, path
        assert all(reading.lost.values())
        assert values(reading) == {k: v for k, v in before.items() if k not in affected}, path


@pytest.mark.parametrize("fault", FAULTS[:5])
@pytest.mark.parametrize("name", ["jetpack5", "jetpack6", "jetpack7", "orin_nano"])
def test_a_node_that_fails_from_the_start_costs_its_own_value(
    name: str, fault: str, tmp_path: Path
) -> None:
    root = BOARDS[name]().write(tmp_path)
    whole = values(opened(root).read())
    for path in read_nodes(root):
        affected = metrics_of(path, root)
        with spoiled(root / path, fault):
            reading = opened(root).read()
        assert values(reading) == {k: v for k, v in whole.items() if k not in affected}, path
        unknown = re.search(r"/(rpm|fan1_input|oc\d_event_cnt|status|rate)$", path)
        if fault == "removed" and unknown:  # nobody can know that the board has it
            assert not reading.lost
        else:
            assert set(reading.lost) == affected, path


@pytest.mark.parametrize("fault", FAULTS[:4])
def test_names_that_cannot_be_read_cost_no_reading(fault: str, tmp_path: Path) -> None:
    root = jetpack6().write(tmp_path)
    watch = Recorder()
    whole = values(opened(root, watch).read())
    named = [
        path
        for path in dict.fromkeys(watch.asked)
        if (root / path).is_file() and path not in read_nodes(root)
    ]
    assert len(named) > 15
    for path in named:
        with spoiled(root / path, fault):
            reading = opened(root).read()
        missing = whole.keys() - values(reading).keys()
        found = {k: v for k, v in values(reading).items() if k in whole}
        assert found == {k: v for k, v in whole.items() if k not in missing}, path
        hidden = {name for name in missing if name.startswith(("fans.", "throttles."))}
        hidden |= missing & {"rails.VDDQ_VDD2_1V8AO"}
        if path.endswith("/type"):  # a zone without a name is none, but for the one to be expected
            hidden |= {name for name in missing if name.startswith("temperatures.")}
            hidden -= {"temperatures.tj"}
        assert missing - hidden <= set(reading.lost), path
