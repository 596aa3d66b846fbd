"""What a step costs beside the engine: the loop over the null engine, part by part.

    python tools/loop_cost.py --json loop_cost.json

Microseconds of host time for each step at 1, 8 and 32 rows that decode. The parts are timed one by
one, in medians; what the whole step takes beyond them is called "deliver_and_the_rest".
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import command
from command import progress

from edge_rt.core import Limits, Request, SamplingParams, StepResult, TokenEvent
from edge_rt.loop import Loop
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner
from edge_rt.sched.scheduler import Scheduler

STEPS, REPEATS, TOKENS = 200, 9, 8000


def limits(rows: int) -> Limits:
    """Of an engine with a slot for each row."""
    return Limits(rows, rows, 512, 64, rows, 2 * TOKENS, 2 * TOKENS, 50_400)


def requests(rows: int) -> list[Request]:
    """One a row, which decode to the end of the measurement."""
    return [Request(f"r{row}", (1, 2, 3), SamplingParams(TOKENS)) for row in range(rows)]


def ignore(_event: TokenEvent) -> None:
    """A reader."""


def whole_us(rows: int) -> float:
    """A step of the loop."""
    loop = Loop(NullRunner(limits(rows), NullOptions()))
    for request in requests(rows):
        loop.submit(request, ignore)
    loop.step()
    return _median_us(loop.step)


def parts_us(rows: int) -> dict[str, float]:
    """schedule, the null engine, and finish, each without what the loop does between them."""
    runner, scheduler = NullRunner(limits(rows), NullOptions()), Scheduler(limits(rows))
    for request in requests(rows):
        scheduler.add(request, 0)
    batch = scheduler.schedule(0)
    scheduler.finish(StepResult(runner.prefill(batch.prefill).tokens, ()), 0)
    spent: dict[str, list[int]] = {"schedule": [], "null_engine": [], "finish": []}
    for _ in range(STEPS * REPEATS // 2):
        times = [time.perf_counter_ns()]
        batch = scheduler.schedule(0)
        times.append(time.perf_counter_ns())
        decoded = runner.decode(batch.decode).tokens
        times.append(time.perf_counter_ns())
        scheduler.finish(StepResult((), decoded), 0)
        times.append(time.perf_counter_ns())
        for name, begun, ended in zip(spent, times, times[1:], strict=False):
            spent[name].append(ended - begun)
    return {name: statistics.median(values) / 1e3 for name, values in spent.items()}


def _median_us(call: Callable[[], object]) -> float:
    found = []
    for _ in range(STEPS * REPEATS // 2):
        begun = time.perf_counter_ns()
        call()
        found.append(time.perf_counter_ns() - begun)
    return statistics.median(found) / 1e3


def measure(_options: argparse.Namespace) -> dict[str, Any]:
    """By rows: a step, and its parts."""
    found = {}
    for rows in (1, 8, 32):
        progress(f"{rows} rows")
        whole, parts = whole_us(rows), parts_us(rows)
        found[f"rows_{rows}"] = {
            "step_us": whole,
            "token_us": whole / rows,
            "tokens_per_s": rows / whole * 1e6,
            "parts_us": parts | {"deliver_and_the_rest": whole - sum(parts.values())},
        }
    return found


def main() -> None:
    """Measure, and write one JSON object to stdout or to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.run(parser, measure)


if __name__ == "__main__":
    main()
