"""Which nodes a board's readers read, and what each of them is the value of."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from edge_rt.core import BoardReading
from edge_rt.power import nodes
from edge_rt.power.board import open_board
from edge_rt.power.settings import BoardSettings
from edge_rt.power.watch import Watch

NO_EVENTS = {
    "oc1_under_voltage": 0,
    "oc2_average_over_current": 0,
    "oc3_instantaneous_over_current": 0,
}


class Recorder(Watch):
    """What was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def ask(self, name: str, call: Callable[[], Any]) -> Any:
        self.asked.append(name)
        return super().ask(name, call)


def values(reading: BoardReading) -> dict[str, Any]:
    """Its values by the name that `lost` has for them."""
    found: dict[str, Any] = {}
    for name, value in asdict(reading).items():
        if isinstance(value, dict) and name != "lost":
            kind = {"rails_mw": "rails", "temperatures_c": "temperatures", "clocks_hz": "clocks"}
            kind |= {"fans_rpm": "fans"}
            found |= {f"{kind.get(name, name)}.{label}": one for label, one in value.items()}
        elif name == "memory_total_bytes" and value is not None:
            found["memory"] = (value, reading.memory_available_bytes)
        elif name in {"power_mw", "power_mode"} and value is not None:
            found[name.removesuffix("_mw")] = value
    return found


def metrics_of(path: str, root: Path) -> set[str]:
    """What a node's value is the value of, by the names that `lost` has."""
    directory, _, node = path.rpartition("/")
    if found := re.fullmatch(r"(?:in|curr)(\d)_input", node):
        label = (root / directory / f"in{found[1]}_label").read_text().strip()
        summed = {"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "VDD_IN"}
        return {f"rails.{label}"} | ({"power"} if label in summed else set())
    if node == "temp":
        kind = (root / directory / "type").read_text().strip().lower()
        return {"temperatures." + re.sub("-therm(al)?$|_tegra$", "", kind)}
    if found := re.fullmatch(r"(oc\d)_event_cnt", node):
        return {f"throttles.{name}" for name in NO_EVENTS if name.startswith(found[1])}
    if found := re.search(r"(?:policy|cpu)(\d+)/(?:scaling_cur_freq|online)$", path):
        return {f"clocks.cpu{found[1]}"}
    if node in {"rpm", "fan1_input"}:
        return {"fans." + (root / directory / "name").read_text().strip()}
    return {
        "power1_input": {"rails.VIN", "power"},
        "cur_freq": {"clocks.gpu"},
        "rate": {"clocks.emc"},
        "load": {"loads.gpu"},
        "meminfo": {"memory"},
        "status": {"power_mode"},
    }[node]


def read_nodes(root: Path) -> list[str]:
    """The nodes that a reading of a tree reads and that exist."""
    watch = Recorder()
    board = open_board(BoardSettings(root=str(root)), watch)
    watch.asked.clear()
    board.read()
    return [path for path in dict.fromkeys(watch.asked) if (root / path).exists()]


def fail_nodes(monkeypatch: pytest.MonkeyPatch, failing: set[str], number: int) -> None:
    """Reads of these files fail as a driver's do."""
    read = nodes._read

    def fail(path: str, limit: int) -> bytes:
        if path in failing:
            raise OSError(number, os.strerror(number), path)
        return read(path, limit)

    monkeypatch.setattr(nodes, "_read", fail)
