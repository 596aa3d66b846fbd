"""The sensors of a machine with NVIDIA GPUs: what is read, and whether its energy is right.

    python tools/gpu/board.py --json board.json

Reads for so long while nothing runs and while matrix products do (with torch), as the daemon does.
The energy that the sampler integrates stands beside that of the boards' own counters
(nvmlDeviceGetTotalEnergyConsumption).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import torch

from edge_rt.core import BoardReading
from edge_rt.power.board import open_board
from edge_rt.power.sampler import Sampler
from edge_rt.power.settings import BoardSettings

SIZE, READS = 8192, 50


def counters_j() -> float:
    """Energy of all boards since their driver was loaded."""
    handles = (pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount()))
    return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(one) for one in handles) * 1e-3


def last(sampler: Sampler) -> BoardReading:
    """The last reading, once there is one."""
    while (found := sampler.latest()) is None:
        time.sleep(0.01)
    return found[1]


def phase(sampler: Sampler, work: Callable[[], object], seconds: float) -> dict[str, Any]:
    """What was read while `work` was done over and over."""
    powers_mw, before, counted_j = [], last(sampler), counters_j()
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < seconds:
        work()
        reading = last(sampler)
        if reading.power_mw is not None:
            powers_mw.append(reading.power_mw)
    took_s, counted_j = time.monotonic() - begun_s, counters_j() - counted_j
    after = last(sampler)
    assert after.energy_j is not None
    assert after.metered_s is not None
    energy_j, metered_s = after.energy_j, after.metered_s
    if before.energy_j is not None and before.metered_s is not None:
        energy_j, metered_s = energy_j - before.energy_j, metered_s - before.metered_s
    return {
        "seconds": took_s,
        "power_w_median": statistics.median(powers_mw) * 1e-3,
        "power_w_by_energy": energy_j / metered_s,
        "power_w_by_counters": counted_j / took_s,
        "ratio_to_counters": energy_j / metered_s / (counted_j / took_s),
        "reading": asdict(after),
    }


def products() -> Callable[[], object]:
    """A tenth of a second or so of matrix products."""
    a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(50):
            a @ a
        torch.cuda.synchronize()

    return work


def measure(interval_s: float, seconds: float) -> dict[str, Any]:
    """All of it."""
    pynvml.nvmlInit()
    settings = BoardSettings(interval_s=interval_s)
    board = open_board(settings)
    board.read()
    begun_s = time.perf_counter()
    for _ in range(READS):
        board.read()
    read_us = (time.perf_counter() - begun_s) / READS * 1e6
    board.close()
    pynvml.nvmlInit()
    sampler = Sampler(partial(open_board, settings), interval_s)
    sampler.start()
    last(sampler)
    found: dict[str, Any] = {"read_us": read_us, "interval_s": interval_s}
    found["idle"] = phase(sampler, lambda: time.sleep(0.1), seconds)
    work = products()
    phase(sampler, work, 3)  # until clocks and power have settled
    found["products"] = phase(sampler, work, seconds)
    latest = sampler.latest()
    assert latest is not None
    found["board"] = asdict(latest[0])
    sampler.stop()
    return found


def main() -> None:
    """Measure and write one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--commit", default="unknown", help="what is measured")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S")
    parser.add_argument("--seconds", type=float, default=40.0, metavar="S")
    options = parser.parse_args()
    found = {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "commit": options.commit,
        "gpu": torch.cuda.get_device_name(),
        **measure(options.interval, options.seconds),
    }
    options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
