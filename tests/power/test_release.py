"""L4T's release and the board's names."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.board_trees import jetpack6

from edge_rt.power.board import open_board
from edge_rt.power.nodes import NodeError, Nodes
from edge_rt.power.release import JETPACKS, Identity, l4t
from edge_rt.power.settings import BoardSettings
from edge_rt.power.watch import Watch


def nodes_with(root: Path, release: str) -> Nodes:
    (root / "etc").mkdir()
    (root / "etc/nv_tegra_release").write_text(release)
    return Nodes(str(root), Watch())


@pytest.mark.parametrize(
    ("line", "release", "jetpack"),
    [
        ("# R35 (release), REVISION: 4.1, GCID: 33958178, BOARD: t186ref", "35.4.1", "5.1.2"),
        ("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic", "36.4.3", "6.2"),
        ("# R36 (release), REVISION: 4.7, GCID: 1", "36.4.7", "6.2.1"),
        ("# R36 (release), REVISION: 5.0", "36.5.0", "6.2.2"),
        ("# R38 (release), REVISION: 4.0", "38.4.0", "7.1"),
        ("# R39 (release), REVISION: 2.2, DATE: x\n# KERNEL_VARIANT: oot", "39.2.2", "7.2.2"),
    ],
)
def test_releases(line: str, release: str, jetpack: str, tmp_path: Path) -> None:
    assert l4t(nodes_with(tmp_path, line)) == release
    assert JETPACKS[release] == jetpack


def test_bug_781_a_new_release_is_named_itself(tmp_path: Path) -> None:
    root = jetpack6().write(tmp_path)
    (root / "etc/nv_tegra_release").write_text("# R41 (release), REVISION: 0.1, GCID: 1\n")
    info = open_board(BoardSettings(root=str(root))).info
    assert (info.l4t, info.jetpack) == ("41.0.1", None)


@pytest.mark.parametrize("line", ["", "R36", "# R (release), REVISION: 4.3", "\0\0"])
def test_no_release(line: str, tmp_path: Path) -> None:
    with pytest.raises(NodeError):
        l4t(nodes_with(tmp_path, line))


def test_names_of_a_board_end_in_nul(tmp_path: Path) -> None:
    found = Identity.read(Nodes(str(jetpack6().write(tmp_path)), Watch()))
    assert found.model == "NVIDIA Jetson AGX Orin Developer Kit"
    assert found.compatible[-1] == "nvidia,tegra234"
    assert found.has("p3701")
    assert not found.has("p3767")


def test_the_tree_is_found_where_procfs_has_none(tmp_path: Path) -> None:
    root = jetpack6().write(tmp_path)
    (root / "sys/firmware/devicetree").mkdir(parents=True)
    (root / "proc/device-tree").rename(root / "sys/firmware/devicetree/base")
    assert Identity.read(Nodes(str(root), Watch())).is_jetson


@pytest.mark.parametrize("held", [b"", b"\0", b"\x01\x02", b"x" * 5000])
def test_a_serial_number_that_is_none(held: bytes, tmp_path: Path) -> None:
    root = jetpack6().write(tmp_path)
    (root / "proc/device-tree/serial-number").write_bytes(held)
    assert Identity.read(Nodes(str(root), Watch())).serial is None
