"""A machine that is no Jetson."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fakes.board_nodes import Recorder
from fakes.board_trees import MEMINFO, write_tree

from edge_rt.core import BoardInfo
from edge_rt.power import rounds
from edge_rt.power.board import open_board
from edge_rt.power.settings import BoardSettings

TREE = {
    "sys/class/dmi/id/product_name": "NUC13ANHi7\n",
    "sys/class/thermal/thermal_zone0/type": "acpitz\n",
    "sys/class/thermal/thermal_zone0/temp": "27800\n",
    "sys/class/thermal/thermal_zone1/type": "acpitz\n",
    "sys/class/thermal/thermal_zone1/temp": "41000\n",
    "sys/class/thermal/thermal_zone2/type": "x86_pkg_temp\n",
    "sys/class/thermal/thermal_zone2/temp": "45000\n",
    "sys/class/hwmon/hwmon4/name": "nct6775\n",
    "sys/class/hwmon/hwmon4/fan1_input": "913\n",
    "sys/class/hwmon/hwmon4/fan2_input": "0\n",
    "sys/class/hwmon/hwmon4/fan2_label": "rear\n",
    "proc/meminfo": MEMINFO.format(total=16302456, available=12078564),
    **{
        f"sys/devices/system/cpu/cpufreq/policy{core}/scaling_cur_freq": f"{800000 + core}\n"
        for core in range(20)
    },
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_it_is_read_in_full(tmp_path: Path) -> None:
    board = open_board(BoardSettings(root=str(write_tree(tmp_path, TREE, {}))))
    assert board.info == BoardInfo("linux", "NUC13ANHi7")
    reading = board.read()
    assert reading.temperatures_c == {"acpitz": 27.8, "acpitz_2": 41.0, "x86_pkg_temp": 45.0}
    assert reading.fans_rpm == {"nct6775": 913, "rear": 0}
    assert reading.clocks_hz == {f"cpu{core}": (800000 + core) * 1e3 for core in range(16)}
    assert reading.memory_total_bytes == 16302456 * 1024
    assert reading.memory_available_bytes == 12078564 * 1024
    assert (reading.power_mw, reading.lost) == (None, {})
    board.close()


def test_a_zone_whose_type_is_gone_keeps_its_name(tmp_path: Path) -> None:
    root = write_tree(tmp_path, TREE, {})
    board = open_board(BoardSettings(root=str(root)))
    (root / "sys/class/thermal/thermal_zone0/type").unlink()
    board._find()  # type: ignore[attr-defined]
    assert board.read().temperatures_c == {"acpitz": 27.8, "acpitz_2": 41.0, "x86_pkg_temp": 45.0}


def test_a_driver_that_loads_after_us_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_tree(tmp_path, TREE, {})
    board = open_board(BoardSettings(root=str(root)))
    write_tree(root, {"sys/class/hwmon/hwmon5/rpm": "700\n"}, {})
    assert "fan" not in board.read().fans_rpm  # not each time
    monkeypatch.setattr(rounds, "FIND_S", 0.0)
    reading = board.read()
    assert reading.fans_rpm["fan"] == 700
    assert reading.lost == {}


def test_where_nothing_changes_no_label_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "FIND_S", 0.0)
    watch = Recorder()
    board = open_board(BoardSettings(root=str(write_tree(tmp_path, TREE, {}))), watch)
    watch.asked.clear()
    board.read()
    assert not [name for name in watch.asked if name.endswith(("type", "name", "label"))]


@pytest.mark.parametrize(
    "held",
    [
        "",
        "MemTotal: 5 kB\n",
        "MemTotal:       100 kB\nMemAvailable:   200 kB\n",
        "MemTotal:       0 kB\nMemAvailable:   0 kB\n",
        "MemTotal:       -1 kB\nMemAvailable:   -1 kB\n",
    ],
)
def test_memory_that_cannot_be(held: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path, TREE | {"proc/meminfo": held}, {})
    reading = open_board(BoardSettings(root=str(root))).read()
    assert reading.memory_total_bytes is None
    assert set(reading.lost) == {"memory"}


def test_an_empty_machine_has_nothing_to_lose(tmp_path: Path) -> None:
    board = open_board(BoardSettings(root=str(tmp_path)))
    assert board.info == BoardInfo("linux")
    assert set(board.read().lost) == {"memory"}


def test_this_machine_is_read() -> None:
    board = open_board(BoardSettings())
    assert board.read().memory_total_bytes
    board.close()
