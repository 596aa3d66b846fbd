"""Which settings of the CPU engine are fast on this machine: prefill chunk, threads, spinning.

    python tools/cpu_settings.py BUNDLE --json settings.json

Engines of one bundle, in turns: milliseconds of a decode step at 1 and at max_batch rows, alone and
beside a process that keeps one core busy, for each choice of threads and spinning; tokens per
second of a long prompt for each prefill chunk, and how long one chunk holds up those that decode.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command
from command import progress
from peer_engines import with_settings

from edge_rt.bench import conditions
from edge_rt.bundle import Bundle
from edge_rt.core import DecodeRow, Draw, PrefillChunk, SamplingParams
from edge_rt.errors import ConfigError
from edge_rt.runtime.base import Runner
from edge_rt.runtime.engines import open_engine
from edge_rt.runtime.ort import usable_cores

TURNS, STEPS, CONTEXT = 15, 20, 64
CHUNKS = (16, 32, 64, 128, 256)
DRAW = Draw(SamplingParams(), 0, (), ())


def prefill(engine: Runner, tokens: int, chunk: int, row: int = 0) -> float:
    """Seconds for a prompt in chunks."""
    begun = time.perf_counter()
    for start in range(0, tokens, chunk):
        part = tuple(range(1 + start, 1 + min(start + chunk, tokens)))
        last = start + len(part) == tokens
        engine.prefill([PrefillChunk(f"{row}", (row,), start, part, (DRAW,) if last else ())])
    return time.perf_counter() - begun


def step_ms(engine: Runner, rows: int) -> float:
    """The median of some steps behind CONTEXT tokens."""
    found = []
    for position in range(CONTEXT, CONTEXT + STEPS):
        batch = [DecodeRow(f"{row}", (row,), position, 1 + row, DRAW) for row in range(rows)]
        begun = time.perf_counter()
        engine.decode(batch)
        found.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(found)


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """A process that never waits, and ends with this one."""
    code = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield
        finally:
            process.kill()


def of_threads(bundle: Bundle, rows: int) -> list[dict[str, Any]]:
    """Decode steps for each choice of threads and spinning."""
    most = usable_cores()
    choices = [(most, False), (most, True)] + ([(1, False)] if most > 1 else [])
    engines = [
        open_engine(with_settings(bundle, threads=threads, spinning=spins))
        for threads, spins in choices
    ]
    for engine in engines:
        for row in range(rows):
            prefill(engine, CONTEXT, CONTEXT, row)
    found: list[dict[str, Any]] = [{"threads": n, "spinning": spins} for n, spins in choices]
    for suffix, company in (("", contextlib.nullcontext()), ("_beside_a_busy_core", busy_core())):
        with company:
            for batch in dict.fromkeys((1, rows)):
                turns = [[step_ms(engine, batch) for engine in engines] for _ in range(TURNS)]
                for one, times in zip(found, zip(*turns, strict=True), strict=True):
                    one[f"step_ms_b{batch}{suffix}"] = statistics.median(times)
    for engine in engines:
        engine.close()
    return found


def of_chunks(bundle: Bundle) -> list[dict[str, float]]:
    """A prompt of half the context for each chunk."""
    tokens = bundle.manifest.limits().max_context // 2
    chunks = [chunk for chunk in CHUNKS if chunk <= tokens]
    engine = open_engine(bundle)
    turns = [[prefill(engine, tokens, chunk) for chunk in chunks] for _ in range(TURNS)]
    engine.close()
    found = []
    for chunk, times in zip(chunks, zip(*turns, strict=True), strict=True):
        wall_s = statistics.median(times)
        found.append(
            {
                "prefill_chunk": chunk,
                "tokens_per_s": tokens / wall_s,
                "chunk_ms": wall_s * 1e3 * chunk / tokens,
            }
        )
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both tables."""
    bundle = Bundle.load(options.bundle)
    if bundle.manifest.recipe.engine != "ort":
        raise ConfigError(
            f"{options.bundle} is a bundle of the {bundle.manifest.recipe.engine} engine; give one "
            f"of the ort engine"
        )
    warnings = conditions.warnings()
    progress("threads and spinning")
    threads = of_threads(bundle, bundle.manifest.recipe.max_batch)
    progress("prefill chunks")
    return {
        "warnings": warnings,
        "context_tokens": CONTEXT,
        "threads": threads,
        "chunks": of_chunks(bundle),
    }


def main() -> None:
    """Measure, and write one JSON object to stdout or to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    command.run(parser, measure)


if __name__ == "__main__":
    main()
