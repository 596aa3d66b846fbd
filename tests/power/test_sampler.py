"""The reading thread: energy, faults, and nodes that hang."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from fakes.board_nodes import metrics_of, read_nodes, values
from fakes.board_trees import BOARDS, jetpack6
from fakes.waiting import eventually

from edge_rt.core import BoardInfo, BoardReading
from edge_rt.power import sampler as module
from edge_rt.power import watch as watch_module
from edge_rt.power.board import Board, open_board
from edge_rt.power.sampler import Latest, Sampler
from edge_rt.power.settings import BoardSettings
from edge_rt.power.watch import Watch

DEADLINE_S = 60


@pytest.fixture(autouse=True)
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


class FakeBoard:
    """Gives power after power; does what it is told when it is read or closed."""

    info = BoardInfo("jetson", power_scope="all")

    def __init__(self, on_read: Callable[[], None] = lambda: None) -> None:
        self.on_read, self.reads, self.closed = on_read, 0, threading.Event()

    def read(self) -> BoardReading:
        self.reads += 1
        self.on_read()
        return BoardReading(time.monotonic_ns(), power_mw=2000.0)

    def close(self) -> None:
        self.closed.set()


def wait_for(sampler: Sampler, condition: Callable[[Latest], bool]) -> Latest:
    def is_there() -> Latest | None:
        latest = sampler.latest()
        return latest if latest is not None and condition(latest) else None

    found: Latest = eventually(is_there)
    return found


def test_energy_is_integrated_over_the_readings() -> None:
    sampler = Sampler(lambda _: FakeBoard(), 0.1)
    assert sampler.latest() is None
    sampler.start()
    info, reading = wait_for(sampler, lambda found: (found[1].metered_s or 0) > 0.5)
    sampler.stop()
    assert info == FakeBoard.info
    assert reading.energy_j == pytest.approx(2.0 * (reading.metered_s or 0))


def test_the_board_is_closed_once_it_is_not_read() -> None:
    board = FakeBoard()
    sampler = Sampler(lambda _: board, 0.1)
    sampler.start()
    eventually(lambda: board.reads > 1)
    sampler.stop()
    reads = board.reads
    assert board.closed.is_set()
    time.sleep(0.3)
    assert board.reads == reads


def test_a_fault_of_ours_is_logged_once_and_reading_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        if board.reads < 5:
            raise ZeroDivisionError(board.reads)

    board = FakeBoard(fail)
    sampler = Sampler(lambda _: board, 0.1)
    with caplog.at_level(logging.ERROR):
        sampler.start()
        wait_for(sampler, lambda found: found[1].power_mw == 2000)
        sampler.stop()
    assert [record.message for record in caplog.records] == ["the board's sensors cannot be read"]


def test_a_board_that_cannot_be_opened_is_tried_again() -> None:
    fails = iter([True, True, False])

    def opened(_: Watch) -> Board:
        if next(fails):
            raise ZeroDivisionError
        return FakeBoard()

    sampler = Sampler(opened, 0.1)
    sampler.start()
    wait_for(sampler, lambda found: found[1].power_mw == 2000)
    sampler.stop()


def test_an_old_reading_is_seen_as_such() -> None:
    goes_on = threading.Event()
    board = FakeBoard(lambda: None if board.reads < 3 else goes_on.wait(DEADLINE_S) and None)
    sampler = Sampler(lambda _: board, 0.1)
    sampler.start()
    info, reading = wait_for(sampler, lambda found: bool(found[1].lost))
    assert info == FakeBoard.info
    assert reading.power_mw is None
    assert reading.lost.keys() == {"sensors"}
    assert "have not answered for" in reading.lost["sensors"]
    goes_on.set()
    wait_for(sampler, lambda found: found[1].power_mw == 2000)
    sampler.stop()


# Nodes that hang: a FIFO that nobody writes to blocks whoever opens it.


@pytest.fixture
def fifos() -> Iterator[Callable[[Path], None]]:
    """Makes a node hang; at the end all go on, so that no thread stays."""
    made: list[Path] = []

    def hang(node: Path) -> None:
        node.unlink()
        os.mkfifo(node)
        made.append(node)

    yield hang
    for node in made:
        release(node)


def release(node: Path) -> None:
    """Let those go on who are in it."""
    try:
        os.close(os.open(node, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:  # nobody is, or it is gone
        return


def of_tree(root: Path, watch: Watch | None = None, interval_s: float = 0.2) -> Sampler:
    return Sampler(partial(open_board, BoardSettings(root=str(root))), interval_s, watch)


def node_of(root: Path, pattern: str, held: str = "") -> Path:
    (found,) = (path for path in root.glob(pattern) if held in path.read_text())
    return found


def test_a_node_that_hangs_costs_its_own_value(
    tmp_path: Path, fifos: Callable[[Path], None]
) -> None:
    root = jetpack6().write(tmp_path)
    gpu = node_of(root, "sys/class/hwmon/*/in1_label", "VDD_GPU_SOC")
    sampler = of_tree(root)
    sampler.start()
    before = wait_for(sampler, lambda found: found[1].power_mw is not None)[1]
    fifos(gpu.with_name("curr1_input"))
    after = wait_for(sampler, lambda found: "rails.VDD_GPU_SOC" in found[1].lost)[1]
    sampler.stop()
    assert set(after.lost) == {"rails.VDD_GPU_SOC", "power"}
    assert after.lost["rails.VDD_GPU_SOC"].endswith("curr1_input: does not answer")
    rails = {k: v for k, v in before.rails_mw.items() if k != "VDD_GPU_SOC"}
    assert after.rails_mw == rails
    assert after.temperatures_c == before.temperatures_c
    assert after.power_mode == before.power_mode


@pytest.mark.slow
@pytest.mark.parametrize("name", BOARDS)
def test_each_node_that_hangs_costs_its_own_value(
    name: str, tmp_path: Path, fifos: Callable[[Path], None]
) -> None:
    template = BOARDS[name]().write(tmp_path / "template")
    whole = values(open_board(BoardSettings(root=str(template))).read())
    samplers = {}
    for number, path in enumerate(read_nodes(template)):
        root = shutil.copytree(template, tmp_path / str(number), symlinks=True)
        samplers[path] = of_tree(root, interval_s=1.0)
        fifos(root / path)
        samplers[path].start()
    for path, sampler in samplers.items():
        affected = metrics_of(path, template)
        reading = wait_for(sampler, lambda found: "sensors" not in found[1].lost)[1]
        assert set(reading.lost) - {path} == affected, path
        assert values(reading) == {k: v for k, v in whole.items() if k not in affected}, path
    for sampler in samplers.values():
        sampler.stop()


@pytest.mark.parametrize(
    "path",
    ["proc/device-tree/model", "sys/class/thermal/thermal_zone5/type", "etc/nv_tegra_release"],
)
def test_a_name_that_hangs_while_the_board_is_opened(
    path: str, tmp_path: Path, fifos: Callable[[Path], None]
) -> None:
    root = jetpack6().write(tmp_path)
    fifos(root / path)
    sampler = of_tree(root)
    sampler.start()
    reading = wait_for(sampler, lambda found: found[1].power_mw is not None)[1]
    sampler.stop()
    assert any("does not answer" in why for why in reading.lost.values())
    assert any(path in name + why for name, why in reading.lost.items())


def test_a_node_is_asked_again_when_its_thread_is_back_and_time_has_passed(
    tmp_path: Path, fifos: Callable[[Path], None]
) -> None:
    root = jetpack6().write(tmp_path)
    node = node_of(root, "sys/class/thermal/*/type", "tj-thermal").with_name("temp")
    fifos(node)
    now = [0.0]
    watch = Watch(clock=lambda: time.monotonic() + now[0])
    sampler = of_tree(root, watch)
    sampler.start()
    wait_for(sampler, lambda found: "temperatures.tj" in found[1].lost)
    now[0] += 61  # but the thread is in it still: another would only join it
    time.sleep(1)
    assert watch.stuck == 1
    assert "does not answer" in wait_for(sampler, lambda _: True)[1].lost["temperatures.tj"]
    release(node)
    eventually(lambda: watch.stuck == 0)
    node.unlink()
    node.write_text("50000\n")
    reading = wait_for(sampler, lambda found: "temperatures.tj" not in found[1].lost)[1]
    assert reading.temperatures_c["tj"] == 50.0
    sampler.stop()


def test_a_node_that_has_come_back_is_not_asked_at_once(
    tmp_path: Path, fifos: Callable[[Path], None]
) -> None:
    root = jetpack6().write(tmp_path)
    node = node_of(root, "sys/class/thermal/*/type", "tj-thermal").with_name("temp")
    fifos(node)
    watch = Watch()
    sampler = of_tree(root, watch)
    sampler.start()
    wait_for(sampler, lambda found: "temperatures.tj" in found[1].lost)
    hanging = node.rename(node.with_name("moved"))
    node.write_text("50000\n")
    release(hanging)
    eventually(lambda: watch.stuck == 0)
    time.sleep(0.5)
    assert "does not answer" in wait_for(sampler, lambda _: True)[1].lost["temperatures.tj"]
    sampler.stop()


def test_only_a_few_threads_are_ever_given_up(
    tmp_path: Path, fifos: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "PATIENCE_S", 0.2)
    monkeypatch.setattr(module, "CHECK_S", 0.1)
    root = jetpack6().write(tmp_path)
    zones = sorted(root.glob("sys/class/thermal/*/temp"))
    for zone in zones:
        fifos(zone)
    watch = Watch()
    sampler = of_tree(root, watch)
    sampler.start()
    eventually(lambda: watch.stuck == module.MAX_STUCK)
    time.sleep(1)
    assert len(zones) > watch.stuck == module.MAX_STUCK
    latest = sampler.latest()
    assert latest is not None
    assert latest[1].lost.keys() == {"sensors"}
    for zone in zones:
        release(zone)
        zone.unlink()
        zone.write_text("40000\n")
    wait_for(sampler, lambda found: found[1].power_mw is not None)
    sampler.stop()


def test_stop_does_not_wait_for_what_hangs(tmp_path: Path, fifos: Callable[[Path], None]) -> None:
    root = jetpack6().write(tmp_path)
    fifos(root / "proc/meminfo")
    watch = Watch()
    sampler = of_tree(root, watch)
    sampler.start()
    eventually(lambda: watch._inside is not None and watch._inside[0] == "proc/meminfo")
    sampler.stop()
    assert any(thread.name == "board" for thread in threading.enumerate())


def test_stop_does_not_wait_for_a_board_that_does_not_close() -> None:
    goes_on = threading.Event()
    board = FakeBoard()
    board.close = lambda: goes_on.wait(DEADLINE_S) and None  # type: ignore[method-assign]
    sampler = Sampler(lambda _: board, 0.1)
    sampler.start()
    eventually(lambda: board.reads > 0)
    sampler.stop()
    assert any(thread.name == "board-close" for thread in threading.enumerate())
    goes_on.set()


def test_one_who_is_back_changes_nothing(tmp_path: Path) -> None:
    watch, goes_on, told = Watch(), threading.Event(), []
    watch_out = threading.Event()

    def read() -> None:
        watch.claim()
        try:
            watch.ask("a node", lambda: watch_out.set() or goes_on.wait(DEADLINE_S))
        except watch_module.Disowned:
            told.append("thrown out")
        else:
            told.append("went on")

    thread = threading.Thread(target=read)
    thread.start()
    watch_out.wait(DEADLINE_S)
    eventually(lambda: watch.give_up() == "a node")
    watch.claim()
    goes_on.set()
    thread.join(DEADLINE_S)
    assert told == ["thrown out"]
    assert watch.ask("another", lambda: 1) == 1
