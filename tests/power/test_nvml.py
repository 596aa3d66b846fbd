"""NVIDIA's boards through NVML, with a fake library; and its absence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.board_tools import NvmlFault, nvml_module
from fakes.board_tools import nvml_gpu as gpu

from edge_rt.core import BoardInfo
from edge_rt.power import rounds
from edge_rt.power.board import Board, open_board
from edge_rt.power.settings import BoardSettings

NOT_SUPPORTED, LOST, NOT_LOADED = NvmlFault(3), NvmlFault(15), 9


def opened(monkeypatch: pytest.MonkeyPatch, root: Path, module: Any) -> Board:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return open_board(BoardSettings(root=str(root)))


def test_a_board_is_read_in_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sys/class/dmi/id").mkdir(parents=True)
    (tmp_path / "sys/class/dmi/id/product_name").write_text("PowerEdge R760\n")
    board = opened(monkeypatch, tmp_path, nvml_module(gpu()))
    assert board.info == BoardInfo("nvml", "PowerEdge R760, NVIDIA H200", power_scope="GPU boards")
    reading = board.read()
    assert reading.power_mw == 101250
    assert reading.rails_mw == {"gpu0": 101250}
    assert reading.temperatures_c == {"gpu0": 41}
    assert reading.clocks_hz == {"gpu0": 1980e6, "gpu0_memory": 3201e6}
    assert reading.loads == {"gpu0": pytest.approx(0.37), "gpu0_memory": pytest.approx(0.12)}
    assert set(reading.throttles.values()) == {0}
    assert set(reading.lost) == {"memory"}  # the tree has no /proc
    board.close()


def test_power_is_the_sum_of_all_boards_or_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    second = gpu(power=200000)
    board = opened(monkeypatch, tmp_path, nvml_module(gpu(), second))
    assert board.info.model == "2 x NVIDIA H200"
    assert board.read().power_mw == 301250
    second["power"] = LOST
    reading = board.read()
    assert reading.power_mw is None
    assert reading.rails_mw == {"gpu0": 101250}
    assert reading.lost["power"] == "not known without gpu1"
    assert "NVML error 15" in reading.lost["rails.gpu1"]


@pytest.mark.parametrize(
    "value",
    [NOT_SUPPORTED, NvmlFault(21), 9223372036854775794, 4294967295, -1],
    ids=["not supported", "no data", "int64", "uint32", "negative"],
)
@pytest.mark.parametrize("name", ["power", "temperature", "sm", "busy"])
def test_bug_nv_monitor_10_what_is_not_supported_is_left_out(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = opened(monkeypatch, tmp_path, nvml_module(gpu())).read()
    reading = opened(monkeypatch, tmp_path, nvml_module(gpu(**{name: value}))).read()
    kind = {"power": "rails_mw", "temperature": "temperatures_c", "sm": "clocks_hz"}
    for field in ("rails_mw", "temperatures_c", "clocks_hz", "loads"):
        expected = dict(getattr(whole, field))
        if field == kind.get(name, "loads"):
            del expected["gpu0"]
        if field == "loads" and name == "busy" and isinstance(value, Exception):
            expected.clear()  # the two come from one call
        assert getattr(reading, field) == expected
    assert (reading.power_mw is None) == (name == "power")
    assert set(reading.lost) == {"memory"}


def test_a_value_that_was_there_and_is_gone_is_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only = gpu()
    board = opened(monkeypatch, tmp_path, nvml_module(only))
    board.read()
    only["temperature"] = NOT_SUPPORTED
    assert "temperatures.gpu0" in board.read().lost


def test_throttles_count_each_time_they_set_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only = gpu(reasons=0x4)
    board = opened(monkeypatch, tmp_path, nvml_module(only))
    assert board.read().throttles["sw_power_cap"] == 0  # since the first reading
    for reasons in (0x0, 0x4, 0x4, 0x1, 0x44):
        only["reasons"] = reasons
        reading = board.read()
    assert reading.throttles["sw_power_cap"] == 2
    assert reading.throttles["hw_thermal_slowdown"] == 1
    assert sum(reading.throttles.values()) == 3  # idle (1) is none


def test_a_driver_that_loads_after_us(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    board = opened(monkeypatch, tmp_path, nvml_module(gpu(), fault=NOT_LOADED))
    assert (board.info.kind, board.read().power_mw) == ("linux", None)
    monkeypatch.setattr(rounds, "FIND_S", 0.0)
    monkeypatch.setitem(sys.modules, "pynvml", nvml_module(gpu()))
    assert board.read().power_mw == 101250
    assert board.info.kind == "nvml"


def test_a_jetsons_own_gpu_is_not_nvmls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    board = opened(monkeypatch, tmp_path, nvml_module(gpu(name=b"Orin (nvgpu)")))
    assert board.info.kind == "linux"


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    board = open_board(BoardSettings())
    assert board.info.kind in {"linux", "jetson"}


def test_with_the_real_package() -> None:
    """Whether or not this machine has a GPU."""
    pytest.importorskip("pynvml")
    board = open_board(BoardSettings())
    reading = board.read()
    board.close()
    if board.info.kind == "nvml":
        assert reading.temperatures_c
    else:
        assert reading.power_mw is None or board.info.kind == "jetson"
    assert reading.memory_total_bytes
