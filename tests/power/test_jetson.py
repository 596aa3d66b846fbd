"""A Jetson's readers on trees of each JetPack: every value, and what a broken node costs."""

from __future__ import annotations

import errno
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fakes.board_nodes import NO_EVENTS, fail_nodes
from fakes.board_trees import BOARDS, SERIAL, Tree, jetpack5, jetpack6, jetpack7, orin_nano, thor

from edge_rt.core import BoardInfo
from edge_rt.power import rounds
from edge_rt.power.board import open_board
from edge_rt.power.jetson import JetsonBoard
from edge_rt.power.settings import BoardSettings
from edge_rt.power.watch import Watch

AGX_SCOPE = "VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0; module rails, not wall"


@pytest.fixture(autouse=True)
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are read alike where the tests' machine is a Jetson."""
    monkeypatch.setenv("PATH", "")


def opened(root: Path, watch: Watch | None = None) -> JetsonBoard:
    board = open_board(BoardSettings(root=str(root)), watch)
    assert isinstance(board, JetsonBoard)
    return board


EXPECTED: dict[str, tuple[BoardInfo, dict[str, Any]]] = {
    "jetpack5": (
        BoardInfo(
            "jetson", "Jetson AGX Orin Developer Kit", SERIAL, "35.4.1", "5.1.2", AGX_SCOPE
        ),
        {
            "power_mw": 19.864 * 180 + 19.848 * 40 + 4.968 * 980,
            "rails_mw": {
                "VDD_GPU_SOC": 19.864 * 180,
                "VDD_CPU_CV": 19.848 * 40,
                "VIN_SYS_5V0": 4.968 * 980,
                "VDDQ_VDD2_1V8AO": 4.968 * 80,
            },
            "temperatures_c": {
                "cpu": 42.593, "soc0": 40.281, "soc1": 38.937, "soc2": 39.25, "tboard": 32.0,
                "tdiode": 33.75, "tj": 42.593,
            },
            "clocks_hz": {"cpu0": 1113600e3, "cpu4": 729600e3, "cpu8": 2201600e3, "gpu": 306e6},
            "loads": {"gpu": 0.142},
            "fans_rpm": {"tachometer": 2140},
            "throttles": NO_EVENTS,
            "memory_total_bytes": 64349288 * 1024,
            "memory_available_bytes": 45714408 * 1024,
            "power_mode": "MAXN",
        },
    ),
    "jetpack6": (
        BoardInfo(
            "jetson", "NVIDIA Jetson AGX Orin Developer Kit", SERIAL, "36.4.3", "6.2", AGX_SCOPE
        ),
        {
            "power_mw": 12.008 * 280 + 12.0 * 120 + 4.976 * 940,
            "rails_mw": {
                "VDD_GPU_SOC": 12.008 * 280,
                "VDD_CPU_CV": 12.0 * 120,
                "VIN_SYS_5V0": 4.976 * 940,
                "VDDQ_VDD2_1V8AO": 4.976 * 90,
            },
            "temperatures_c": {
                "cpu": 52.562, "gpu": 49.125, "soc0": 47.906, "soc1": 46.531, "soc2": 48.437,
                "tj": 52.562, "tboard": 39.5, "tdiode": 41.25,
            },
            "clocks_hz": {"cpu0": 2188800e3, "cpu4": 729600e3, "gpu": 612e6, "emc": 2133e6},
            "loads": {"gpu": 0.0},
            "fans_rpm": {"pwm_tach": 1893},
            "throttles": NO_EVENTS,
            "memory_total_bytes": 64349288 * 1024,
            "memory_available_bytes": 45714408 * 1024,
            "power_mode": "MODE_30W",
        },
    ),
    "jetpack7": (
        BoardInfo(
            "jetson", "NVIDIA Jetson AGX Orin Developer Kit", SERIAL, "39.2.0", "7.2", AGX_SCOPE
        ),
        {
            "power_mw": 19.8 * 260 + 19.808 * 165 + 4.96 * 1108,
            "rails_mw": {
                "VDD_GPU_SOC": 19.8 * 260,
                "VDD_CPU_CV": 19.808 * 165,
                "VIN_SYS_5V0": 4.96 * 1108,
                "VDDQ_VDD2_1V8AO": 4.96 * 210,
            },
            "temperatures_c": {
                "cpu": 52.968, "gpu": 47.625, "soc0": 48.125, "soc1": 47.0, "soc2": 47.781,
                "tj": 52.968,
            },
            "clocks_hz": {"cpu0": 2201600e3, "cpu4": 2201600e3, "cpu8": 2201600e3, "gpu": 1300.5e6},
            "loads": {"gpu": 0.12},
            "fans_rpm": {"pwmfan": 2310},
            "throttles": NO_EVENTS,
            "memory_total_bytes": 64325432 * 1024,
            "memory_available_bytes": 43186176 * 1024,
            "power_mode": "MODE_50W",
        },
    ),
    "orin_nano": (
        BoardInfo(
            "jetson", "NVIDIA Jetson Orin Nano Developer Kit", SERIAL, "36.4.4", "6.2.1",
            "VDD_IN; module rails, not wall",
        ),
        {
            "power_mw": 4.984 * 1856,
            "rails_mw": {
                "VDD_IN": 4.984 * 1856,
                "VDD_CPU_GPU_CV": 4.984 * 456,
                "VDD_SOC": 4.984 * 392,
            },
            "temperatures_c": {"cpu": 63.625, "gpu": 61.5, "soc0": 60.25, "tj": 63.625},
            "clocks_hz": {"cpu0": 1510400e3, "cpu4": 1510400e3, "gpu": 1020e6},
            "loads": {"gpu": 0.997},
            "fans_rpm": {},
            "throttles": NO_EVENTS,
            "memory_total_bytes": 7802476 * 1024,
            "memory_available_bytes": 3014208 * 1024,
            "power_mode": "MAXN_SUPER",
        },
    ),
    "thor": (
        BoardInfo(
            "jetson", "NVIDIA Jetson AGX Thor Developer Kit", SERIAL, "38.4.0", "7.1",
            "VIN; module rails, not wall",
        ),
        {
            "power_mw": 19780.0,
            "rails_mw": {"VIN": 19780.0},
            "temperatures_c": {"cpu": 44.25, "gpu": 43.5, "tj": 44.25},
            "clocks_hz": {"cpu0": 2601e6, "gpu": 314e6},
            "loads": {},
            "fans_rpm": {},
            "throttles": {},
            "memory_total_bytes": 128706560 * 1024,
            "memory_available_bytes": 101203456 * 1024,
            "power_mode": None,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_is_read_in_full(name: str, tmp_path: Path) -> None:
    board = opened(BOARDS[name]().write(tmp_path))
    info, expected = EXPECTED[name]
    assert board.info == info
    found = asdict(board.read())
    assert found.pop("taken_ns") > 0
    assert found == {
        "energy_j": None,
        "metered_s": None,
        "lost": {},
        **{
            field: pytest.approx(value) if field in {"power_mw", "rails_mw"} else value
            for field, value in expected.items()
        },
    }


def test_names_of_a_machine_that_are_missing_are_lost(tmp_path: Path) -> None:
    root = jetpack6().write(tmp_path)
    for name in ("compatible", "serial-number"):
        (root / "proc/device-tree" / name).unlink()
    (root / "etc/nv_tegra_release").write_text("?\n")
    board = opened(root)
    reading = board.read()
    assert set(reading.lost) == {"info.compatible", "info.serial", "info.l4t"}
    assert (board.info.serial, board.info.l4t, board.info.jetpack) == (None, None, None)
    assert reading.power_mw == pytest.approx(12.008 * 280 + 12.0 * 120 + 4.976 * 940)


# The public's bugs.


def test_bug_344_total_is_the_named_sum(tmp_path: Path) -> None:
    board = opened(jetpack7().write(tmp_path))
    reading = board.read()
    summed = [reading.rails_mw[name] for name in ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")]
    assert reading.power_mw == pytest.approx(sum(summed))
    assert reading.power_mw not in reading.rails_mw.values()


def test_bug_51_no_rail_is_added_to_its_input(tmp_path: Path) -> None:
    reading = opened(orin_nano().write(tmp_path)).read()
    assert reading.power_mw == reading.rails_mw["VDD_IN"]


@pytest.mark.parametrize("name", BOARDS)
def test_a_module_that_is_new_is_summed_by_its_labels(name: str, tmp_path: Path) -> None:
    tree = BOARDS[name]()
    tree.table["proc/device-tree/compatible"] = "acme,board\0nvidia,tegra999\0"
    board = opened(tree.write(tmp_path))
    info, expected = EXPECTED[name]
    assert board.read().power_mw == pytest.approx(expected["power_mw"])
    assert board.info.power_scope == info.power_scope


def test_bug_900_a_usb_port_is_no_rail(tmp_path: Path) -> None:
    root = jetpack6().write(tmp_path)
    assert list(root.glob("sys/class/power_supply/*"))
    assert "VBUS" not in opened(root).read().rails_mw


def test_a_total_is_never_that_of_a_part(tmp_path: Path) -> None:
    tree = jetpack6()
    labels = [path for path, held in tree.table.items() if held == "VDD_CPU_CV\n"]
    del tree.table[labels[0]]
    reading = opened(tree.write(tmp_path)).read()
    assert reading.power_mw is None
    assert reading.lost["power"] == "not known without VDD_CPU_CV"
    assert reading.lost["rails.VDD_CPU_CV"] == "not found"


@pytest.mark.parametrize("way", ["drivers/ina3221", "devices"])
def test_rails_are_found_whatever_leads_to_them(way: str, tmp_path: Path) -> None:
    tree = jetpack6()
    tree.links = {
        path: target
        for path, target in tree.links.items()
        if not path.startswith("sys/class/hwmon") and ("i2c" not in path or way in path)
    }
    reading = opened(tree.write(tmp_path)).read()
    assert len(reading.rails_mw) == 4
    assert reading.power_mw is not None


def test_bug_888_a_missing_node_is_null(tmp_path: Path) -> None:
    root = jetpack7().write(tmp_path)
    assert not list(root.rglob("enable_3d_scaling"))
    assert opened(root).read().lost == {}


def test_bug_470_a_path_that_is_gone_costs_one_metric(tmp_path: Path) -> None:
    root = jetpack6().write(tmp_path)
    shutil.rmtree(root / "sys/kernel")
    reading = opened(root).read()
    assert "emc" not in reading.clocks_hz
    assert reading.lost == {}  # without root debugfs is never to be seen


def test_bug_556_an_offline_core_is_skipped(tmp_path: Path) -> None:
    root = jetpack5().write(tmp_path)
    board = opened(root)
    board.read()
    (root / "sys/devices/system/cpu/cpu8/online").write_text("0\n")
    policy = root / "sys/devices/system/cpu/cpufreq/policy8/scaling_cur_freq"
    policy.write_text("<unknown>\n")
    reading = board.read()
    assert set(reading.clocks_hz) == {"cpu0", "cpu4", "gpu"}
    assert reading.lost == {}


def test_bug_889_a_driver_that_loads_after_us_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = jetpack6().write(tmp_path)
    parts = [root / "sys/devices/platform/bus@0", root / "sys/class/devfreq/17000000.gpu"]
    for part in parts:
        part.rename(tmp_path / part.name)
    board = opened(root)
    assert {"loads.gpu", "clocks.gpu"} <= set(board.read().lost)
    for part in parts:
        (tmp_path / part.name).rename(part)
    assert "loads.gpu" in board.read().lost  # directories are not listed each time
    monkeypatch.setattr(rounds, "FIND_S", 0.0)
    reading = board.read()
    assert reading.loads == {"gpu": 0.0}
    assert reading.lost == {}


def test_what_is_lost_is_looked_for_where_no_driver_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = jetpack6().write(tmp_path)
    (label,) = (p for p in root.glob("sys/class/hwmon/*/in1_label") if "GPU" in p.read_text())
    label.unlink()
    board = opened(root)
    assert board.read().power_mw is None
    label.write_text("VDD_GPU_SOC\n")
    monkeypatch.setattr(rounds, "FIND_S", 0.0)
    assert board.read().power_mw is not None


def test_monitors_that_come_back_under_another_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = jetpack6().write(tmp_path)
    board = opened(root)
    power_mw = board.read().power_mw
    (ina,) = (p.parent for p in root.glob("sys/class/hwmon/*/in1_label") if "GPU" in p.read_text())
    ina.rename(ina.with_name("hwmon17"))
    assert board.read().power_mw is None
    monkeypatch.setattr(rounds, "FIND_S", 0.0)
    assert board.read().power_mw == power_mw


def test_bug_alumet_212_a_disabled_channel_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = jetpack6()
    (enable,) = (path for path in tree.table if path.endswith("in1_enable"))
    tree.table[enable.replace("enable", "label")] = "SPARE\n"
    root = tree.write(tmp_path)
    real = f"{root}/{re.sub('sys/devices.*(hwmon[0-9]+)/', r'sys/class/hwmon/@1/', enable)}"
    number = re.search(r"hwmon\d+", enable)
    assert number is not None
    disabled = real.replace("@1", number[0]).replace("in1_enable", "in1_input")
    fail_nodes(monkeypatch, {disabled}, errno.EIO)
    reading = opened(root).read()
    assert "SPARE" not in reading.rails_mw
    assert reading.lost == {}


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, set[str]]:
    root = jetpack6().write(tmp_path)
    failing: set[str] = set()
    fail_nodes(monkeypatch, failing, errno.EAGAIN)
    return root, failing


def zone(root: Path, kind: str) -> str:
    (found,) = (
        p.parent for p in root.glob("sys/class/thermal/*/type") if p.read_text() == f"{kind}\n"
    )
    return str(found / "temp")


def test_bug_17_a_gated_zone_has_no_temperature(gated: tuple[Path, set[str]]) -> None:
    root, failing = gated
    failing.add(zone(root, "gpu-thermal"))
    reading = opened(root).read()
    assert "gpu" not in reading.temperatures_c
    assert reading.lost == {}  # it is off as long as the GPU is: no fault


def test_a_zone_that_was_read_and_is_gated_now_is_lost(gated: tuple[Path, set[str]]) -> None:
    root, failing = gated
    board = opened(root)
    board.read()
    failing.update({zone(root, "gpu-thermal"), zone(root, "tj-thermal")})
    assert set(board.read().lost) == {"temperatures.gpu", "temperatures.tj"}


def test_bug_18_scope_says_what_is_not_metered(tmp_path: Path) -> None:
    scope = opened(thor().write(tmp_path)).info.power_scope
    assert scope == "VIN; module rails, not wall"


def test_bug_beszel_286_memory_and_power_are_both_there(tmp_path: Path) -> None:
    reading = opened(jetpack6().write(tmp_path)).read()
    assert reading.memory_available_bytes == 45714408 * 1024  # MemAvailable, not MemFree
    assert reading.power_mw is not None


def test_throttles_count_from_the_first_reading(tmp_path: Path) -> None:
    root = jetpack5().write(tmp_path)
    board = opened(root)
    board.read()
    (counter,) = root.glob("sys/class/hwmon/*/oc3_event_cnt")
    counter.write_text("40\n")  # it was 37
    assert board.read().throttles["oc3_instantaneous_over_current"] == 3
    counter.unlink()
    assert "oc3_instantaneous_over_current" not in board.read().throttles
    counter.write_text("2\n")  # the driver was loaded again
    assert board.read().throttles["oc3_instantaneous_over_current"] == 5


def tree_without_rails() -> Tree:
    tree = jetpack6()
    tree.table = {p: h for p, h in tree.table.items() if "c240000" not in p}
    return tree


def test_a_board_without_monitors_says_which_it_misses(tmp_path: Path) -> None:
    reading = opened(tree_without_rails().write(tmp_path)).read()
    assert set(reading.lost) == {
        "power",
        *(f"rails.{rail}" for rail in ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")),
    }
