"""tegrastats: its line in each JetPack, and the tool as a child."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fakes.board_tools import JETPACK5, JETPACK5_LATE, JETPACK6, JETPACK7, THOR, add_tool
from fakes.board_trees import jetpack6
from fakes.waiting import eventually

from edge_rt.core import BoardReading
from edge_rt.power import tegrastats
from edge_rt.power.board import open_board
from edge_rt.power.draft import Draft, Extra
from edge_rt.power.settings import BoardSettings
from edge_rt.power.tegrastats import Tegrastats, parse

JETPACK5_VALUES = Extra(
    rails_mw={
        "VDD_GPU_SOC": 2399, "VDD_CPU_CV": 400, "VIN_SYS_5V0": 4032, "VDDQ_VDD2_1V8AO": 301,
    },
    temperatures_c={
        "cpu": 42.593, "tboard": 32.0, "soc2": 39.25, "tdiode": 33.75, "soc0": 40.281,
        "tj": 42.593, "soc1": 38.937,
    },
    clocks_hz={"emc": 2133e6},
    loads={"emc": 0.0, "gpu": 0.0},
)  # fmt: skip


def test_jetpack_5() -> None:
    assert parse(JETPACK5) == JETPACK5_VALUES


def test_jetpack_6() -> None:
    assert parse(JETPACK6) == Extra(
        rails_mw={"VDD_GPU_SOC": 2412, "VDD_CPU_CV": 1607, "VIN_SYS_5V0": 4707},
        temperatures_c={"cpu": 52.562, "soc2": 48.437, "tj": 52.562},
        clocks_hz={"emc": 2133e6},
        loads={"emc": 0.03, "gpu": 0.0},
    )


def test_jetpack_7_has_two_temperatures_and_three_powers() -> None:
    assert parse(JETPACK7) == Extra(
        rails_mw={"VDD_GPU_SOC": 5139, "VDD_CPU_CV": 3268, "VIN_SYS_5V0": 5500},
        temperatures_c={"cpu": 52.968, "gpu": 47.625},
        clocks_hz={"emc": 3199e6, "gpu": 1300e6},
        loads={"emc": 0.03, "gpu": 0.12},
    )


def test_the_first_of_several_powers_is_the_present_one() -> None:
    assert parse("VIN 900mW/100mW/200mW").rails_mw == {"VIN": 900}


@pytest.mark.parametrize(
    ("line", "load", "clock_hz"),
    [
        (JETPACK5, 0.0, None),
        (JETPACK5_LATE, 0.14, 407e6),
        (JETPACK7, 0.12, 1300e6),
        (THOR, None, 314e6),
        ("GR3D_FREQ 99%", 0.99, None),
        ("GR3D_FREQ 101%@5", None, 5e6),
    ],
)
def test_bug_894_every_form_of_the_gpu_is_read(
    line: str, load: float | None, clock_hz: float | None
) -> None:
    found = parse(line)
    assert found.loads.get("gpu") == load
    assert found.clocks_hz.get("gpu") == clock_hz


def test_thor_has_no_swap_and_no_load() -> None:
    assert parse(THOR).rails_mw == {"VIN": 19780}


@pytest.mark.parametrize("line", ["", "\n", "\ufffd\ufffd", "mW/mW @C %@", "x" * 8192])
def test_garbage_says_nothing(line: str) -> None:
    assert parse(line) == Extra()


def lost(source: Tegrastats) -> dict[str, str]:
    draft = Draft(0)
    source.fill(draft)
    return draft.lost


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    return path


def test_it_stands_in_for_monitors_that_sysfs_does_not_show(tools: Path, tmp_path: Path) -> None:
    add_tool(
        tools, "tegrastats", f'echo "$@" > {tools}/arguments; echo "{JETPACK6}"; exec sleep 60'
    )
    tree = jetpack6()
    tree.table = {path: held for path, held in tree.table.items() if "c240000" not in path}
    board = open_board(BoardSettings(root=str(tree.write(tmp_path / "root"))))
    reading = BoardReading(0)

    def has_power() -> bool:
        nonlocal reading
        reading = board.read()
        return reading.power_mw is not None

    eventually(has_power)
    board.close()
    assert reading.power_mw == 2412 + 1607 + 4707
    assert reading.temperatures_c["tj"] == 52.562  # sysfs' own
    assert reading.clocks_hz["gpu"] == 612e6
    assert reading.loads == {"gpu": 0.0, "emc": 0.03}
    assert reading.lost == {}
    assert (tools / "arguments").read_text() == "--interval 1000\n"


def test_it_is_not_run_where_sysfs_has_the_rails(tools: Path, tmp_path: Path) -> None:
    add_tool(tools, "tegrastats", f"touch {tools}/ran")
    board = open_board(BoardSettings(root=str(jetpack6().write(tmp_path / "root"))))
    board.read()
    time.sleep(0.5)
    board.close()
    assert not (tools / "ran").exists()


def test_a_child_that_dies_is_started_again_later_each_time(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tegrastats, "BACK_OFF_S", (0.01, 0.04))
    add_tool(tools, "tegrastats", f"echo >> {tools}/starts")
    source = Tegrastats(1.0)
    waits: list[float] = []
    wait = source._stop.wait
    monkeypatch.setattr(source._stop, "wait", lambda s: (waits.append(s), wait(s))[1])
    assert "tegrastats" in lost(source)
    eventually(lambda: len(waits) >= 4)
    assert lost(source) == {"tegrastats": "ended; it is started again"}
    add_tool(tools, "tegrastats", f"echo '{THOR}'; exec sleep 60")
    eventually(lambda: not lost(source))
    source.close()
    assert waits[:4] == [0.02, 0.04, 0.04, 0.04]


def test_close_kills_the_child(tools: Path) -> None:
    add_tool(tools, "tegrastats", f"echo $$ > {tools}/pid; echo '{THOR}'; exec sleep 60")
    source = Tegrastats(1.0)
    eventually(lambda: not lost(source))
    source.close()
    pid = (tools / "pid").read_text().strip()
    eventually(lambda: not Path("/proc", pid).exists())


def test_a_tool_that_cannot_be_started(tools: Path) -> None:
    add_tool(tools, "tegrastats", "").write_bytes(b"\x7fELF")
    source = Tegrastats(1.0)
    eventually(lambda: lost(source).get("tegrastats") == "cannot be started: Exec format error")
    source.close()


def test_an_old_line_is_not_shown(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_tool(tools, "tegrastats", f"echo '{THOR}'; exec sleep 60")
    source = Tegrastats(1.0)
    eventually(lambda: not lost(source))
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 5)
    assert lost(source)
    monkeypatch.undo()
    source.close()
