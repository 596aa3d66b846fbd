"""jetson-stats as an addition: what it fills, and each way in which it fails."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.board_tools import JtopError, jtop_module
from fakes.board_trees import jetpack6
from fakes.waiting import eventually

from edge_rt.core import BoardReading
from edge_rt.power import jtop
from edge_rt.power.board import Board, open_board
from edge_rt.power.draft import Draft, Extra
from edge_rt.power.jtop import Jtop, fault, snapshot
from edge_rt.power.settings import BoardSettings


class Service:
    """A client as jetson-stats' of AGX Orin: `tot` has neither curr nor name."""

    def __init__(self) -> None:
        self.power = {
            "rail": {
                "VDD_GPU_SOC": {"volt": 19864, "curr": 180, "power": 3575, "avg": 3570},
                "VDD_CPU_CV": {"volt": 19848, "curr": 40, "power": 793},
                "VIN_SYS_5V0": {"volt": 4968, "curr": 980, "power": 4868},
                "VDDQ_VDD2_1V8AO": {"volt": 4968, "curr": 80, "power": 397},
                "NC": {"power": 0},
            },
            "tot": {"power": 9633, "avg": 9600},
        }
        self.temperature = {
            "cpu": {"temp": 42.6, "online": True},
            "cv0": {"temp": -256, "online": False},
        }
        self.gpu = {"ga10b": {"freq": {"cur": 306000}, "status": {"load": 14.2}}}
        self.memory = {"EMC": {"cur": 2133000, "val": 3}}
        self.nvpmodel: Any = SimpleNamespace(name="MAXN_SUPER")
        self.board = {"hardware": {"L4T": "36.4.3", "Jetpack": "MISSING", "Serial Number": "142"}}

    def ok(self) -> bool:
        time.sleep(0.01)
        return True


def read_until(board: Board, condition: Callable[[BoardReading], bool]) -> BoardReading:
    found: list[BoardReading] = []

    def is_there() -> bool:
        found[:] = [board.read()]
        return condition(found[0])

    eventually(is_there)
    return found[0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    found = jetpack6().write(tmp_path)
    (found / "run").mkdir()
    (found / "run/jtop.sock").touch()
    (found / "sys/kernel/debug/bpmp/debug/clk/emc/rate").unlink()
    return found


def opened(root: Path, monkeypatch: pytest.MonkeyPatch, *module: Any) -> Board:
    monkeypatch.setitem(sys.modules, "jtop", jtop_module(*module))
    return open_board(BoardSettings(root=str(root)))


def test_a_snapshot() -> None:
    assert snapshot(Service()) == Extra(
        rails_mw={
            "VDD_GPU_SOC": 3575, "VDD_CPU_CV": 793, "VIN_SYS_5V0": 4868, "VDDQ_VDD2_1V8AO": 397,
        },
        temperatures_c={"cpu": 42.6},
        clocks_hz={"gpu": 306e6, "emc": 2133e6},
        loads={"gpu": pytest.approx(0.142), "emc": pytest.approx(0.03)},
        power_mode="MAXN_SUPER",
        l4t="36.4.3",
        serial="142",
    )  # fmt: skip


def test_it_fills_only_what_sysfs_lacks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "var/lib/nvpmodel/status").unlink()
    (root / "proc/device-tree/serial-number").unlink()
    board = opened(root, monkeypatch, Service())
    sysfs = board.read()
    reading = read_until(board, lambda found: "emc" in found.clocks_hz)
    assert reading.clocks_hz == {**sysfs.clocks_hz, "emc": 2133e6}
    assert reading.loads == {"gpu": 0.0, "emc": pytest.approx(0.03)}
    assert reading.temperatures_c == sysfs.temperatures_c
    assert reading.rails_mw == sysfs.rails_mw
    assert reading.power_mode == "MAXN_SUPER"
    assert board.info.serial == "142"
    board.close()


def test_rails_that_sysfs_does_not_show_are_summed_as_ours(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for label in root.glob("sys/class/hwmon/*/in*_label"):
        label.unlink()
    board = opened(root, monkeypatch, Service())
    reading = read_until(board, lambda found: bool(found.rails_mw))
    assert reading.power_mw == 3575 + 793 + 4868  # not jtop's sum, which counts VDDQ twice
    assert reading.lost == {}
    board.close()


def test_bug_ros2_10_a_total_without_current_is_no_fault() -> None:
    service = Service()
    assert "curr" not in service.power["tot"]
    assert len(snapshot(service).rails_mw) == 4


@pytest.mark.parametrize("name", ["power", "temperature", "gpu", "memory", "nvpmodel", "board"])
def test_bug_390_a_part_that_is_missing_costs_itself(name: str) -> None:
    service = Service()
    whole = snapshot(service)
    delattr(service, name)
    assert snapshot(service) != whole
    setattr(service, name, None)  # nvpmodel is None where there is none (JS#567)
    assert snapshot(service) != whole
    setattr(service, name, {"EMC": {}, "rail": {"X": {}}, "hardware": None, "ga10b": {}})
    assert snapshot(service) != whole


def test_a_property_that_raises_costs_itself() -> None:
    class Skewed(Service):
        @property
        def memory(self) -> Any:
            raise KeyError("memory")

        @memory.setter
        def memory(self, _: Any) -> None:
            pass

    assert snapshot(Skewed()).clocks_hz == {"gpu": 306e6}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -256, True, "3", None, 1e30])
def test_a_value_that_cannot_be_is_left_out(value: Any) -> None:
    service = Service()
    service.memory = {"EMC": {"cur": value}}
    assert "emc" not in snapshot(service).clocks_hz


def test_bug_512_without_its_service_sysfs_is_read_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "run/jtop.sock").unlink()
    board = opened(root, monkeypatch, Service())
    reading = read_until(board, lambda found: "systemctl start jtop" in found.lost["jtop"])
    assert reading.power_mw is not None
    assert set(reading.lost) == {"jtop"}
    board.close()


def test_bug_ros2_6_versions_that_differ_are_both_named(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = JtopError("Mismatch version jtop service: [4.2.1] and client: [4.2.2]. Please run:")
    board = opened(root, monkeypatch, None, error)
    reading = read_until(board, lambda found: "versions differ" in found.lost["jtop"])
    assert "4.2.1 and 4.2.2" in reading.lost["jtop"]
    assert reading.power_mw is not None
    board.close()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (JtopError("The jtop.service is not active"), "JtopError: The jtop.service is not active"),
        (JtopError("I can't access jtop.service, permission denied"), "join the group `jtop`"),
        (PermissionError(13, "x"), "join the group `jtop`"),
        (KeyError("memory"), "KeyError: 'memory'"),
        (EOFError(), "EOFError"),
    ],
)
def test_reasons(error: Exception, text: str) -> None:
    assert text in fault(error)


def test_a_service_that_hangs_holds_up_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = threading.Event()
    service = Service()
    service.ok = lambda: hanging.wait(60)  # type: ignore[method-assign]
    board = opened(root, monkeypatch, service)
    reading = read_until(board, lambda found: found.lost["jtop"] == "does not answer")
    assert reading.power_mw is not None
    hanging.set()
    board.close()


def test_an_old_answer_is_not_shown(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, goes_on = Service(), threading.Event()
    answers = iter([True])
    service.ok = lambda: next(answers, None) or goes_on.wait(60)  # type: ignore[method-assign]
    board = opened(root, monkeypatch, service)
    read_until(board, lambda found: "emc" in found.clocks_hz)
    monkeypatch.setattr(jtop, "STALE_S", 0.0)
    assert board.read().lost == {"jtop": "does not answer"}
    goes_on.set()
    board.close()


def test_a_service_that_comes_back_is_followed_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jtop, "STALE_S", 0.0)
    monkeypatch.setitem(sys.modules, "jtop", jtop_module(None, ConnectionResetError(104, "reset")))
    source = Jtop(str(root), retry_s=0.01)

    def lost() -> dict[str, str]:
        draft = Draft(0)
        source.fill(draft)
        return draft.lost

    eventually(lambda: "ConnectionResetError" in lost().get("jtop", ""))
    monkeypatch.setattr(jtop, "STALE_S", 60.0)
    monkeypatch.setitem(sys.modules, "jtop", jtop_module(Service()))
    eventually(lambda: not lost())
    source.close()


def test_where_it_is_not_installed_nothing_is_lost(root: Path) -> None:
    sys.modules.pop("jtop", None)
    source = Jtop(str(root))
    if source._is_installed:
        pytest.skip("jetson-stats is installed here")
    draft = Draft(0)
    source.fill(draft)
    assert draft == Draft(0)
    source.close()
