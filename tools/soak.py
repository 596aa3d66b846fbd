"""A daemon under clients that leave, talk nonsense or read slowly; every request accounted for.

    python tools/soak.py BUNDLE --clients 200 --minutes 5 --json soak.json

Starts the daemon, gets a pool of answers alone, lets the clients loose, and ends it with SIGTERM.
Exit code 1 if anything is lost, wrong or left over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soak_clients
import soak_pool
from origin import cpu_facts, origin
from soak_ledger import Ledger
from soak_wire import Wire, request

from edge_rt.bench.daemon import Daemon, started
from edge_rt.bundle import Bundle
from edge_rt.cli.output import check_json_target, finish, positive, say
from edge_rt.errors import ConfigError, EdgeRTError
from edge_rt.telemetry.percentile import percentile

PROCESSES = 2
POOL = 200
SEED = 1
TICK_S = 0.1
START_S, SETTLE_S = 120, 60
READY = re.compile(r"ready: .* at http://.*:(\d+)$", re.MULTILINE)


class Proc:
    """What Linux says of a process."""

    def __init__(self, number: int) -> None:
        self._path = Path("/proc", str(number))

    def rss_mb(self) -> float:
        """Resident memory."""
        pages = int((self._path / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def cpu_s(self) -> float:
        """Of all its threads."""
        fields = (self._path / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def descriptors(self) -> int:
        """Open files and sockets."""
        return len(list((self._path / "fd").iterdir()))


@dataclass
class Watch:
    """Samples of the daemon: latency of /health ten times a second, memory once."""

    health_s: list[float] = field(default_factory=list)
    rss_mb: list[tuple[float, float]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    async def run(self, port: int, proc: Proc, until: Callable[[], bool]) -> None:
        """Sample until then; a slow answer holds up neither the next question nor the memory."""
        begun = due = time.monotonic()
        probes: list[asyncio.Future[None]] = []
        while not until():
            probes.append(asyncio.ensure_future(self._ask(port)))
            if len(probes) % 10 == 1:
                self.rss_mb.append((time.monotonic() - begun, proc.rss_mb()))
            due += TICK_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await asyncio.gather(*probes)

    async def _ask(self, port: int) -> None:
        asked = time.monotonic()
        try:
            wire = await Wire.open(port)
            await wire.send(b"".join(request(b"", "GET", "/health")))
            head, _ = await wire.all()
            wire.close()
        except (OSError, EOFError) as error:
            self.faults.append(f"/health gave no answer: {error!r}")
            return
        self.health_s.append(time.monotonic() - asked)
        if head.status != 200:
            self.faults.append(f"/health said {head.status}")

    def slope_mb_per_min(self) -> float:
        """Least squares over the last 4/5: the first brings what grows once."""
        later = np.array(self.rss_mb[len(self.rss_mb) // 5 :])
        return float(np.polyfit(later[:, 0], later[:, 1], 1)[0] * 60)


def soak(daemon: Daemon, clients: int, seconds: float) -> dict[str, Any]:
    """The run; what clients and daemon did, and every fault."""
    pool = asyncio.run(soak_pool.known(daemon.port, POOL, SEED))
    time.sleep(1)  # its connection closes
    proc = Proc(daemon.process.pid)
    descriptors, cpu_s = proc.descriptors(), proc.cpu_s()
    seen, watch = soak_clients.Seen(), Watch()
    begun = time.monotonic()
    spawn = multiprocessing.get_context("spawn")  # the clients' processes begin clean
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn) as executor:
        runs = [
            executor.submit(
                soak_clients.run,
                daemon.port,
                len(range(number, clients, PROCESSES)),
                seconds,
                number,
                pool,
            )
            for number in range(PROCESSES)
        ]
        asyncio.run(watch.run(daemon.port, proc, lambda: all(run.done() for run in runs)))
        for run in runs:
            seen.add(run.result())
    seconds, cpu_s = time.monotonic() - begun, proc.cpu_s() - cpu_s
    settled = _settle(proc, descriptors)
    rss_mb = proc.rss_mb()
    daemon.process.send_signal(signal.SIGTERM)
    code: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = daemon.process.wait(SETTLE_S)
    log = daemon.log.read_text()
    ledger = Ledger.read(log)
    ledger.requests = ledger.requests[len(pool) :]
    faults = [*seen.faults, *watch.faults, *ledger.faults(seen)]
    if settled > descriptors:
        faults.append(f"{settled} open files after the run, {descriptors} before")
    if code != 0:
        faults.append(f"the daemon ended with {code}")  # None: it did not
    if "draining; still being served: 0" not in log:
        faults.append("the daemon was not idle at the end")
    return {
        "clients": clients,
        "seconds": round(seconds, 1),
        "requests": sum(seen.kinds.values()),
        "requests_by_kind": dict(sorted(seen.kinds.items())),
        "cut_off_share": _share(seen),
        "log_lines": len(ledger.requests),
        "log_by_status": _by_status(ledger),
        "client_by_status": {str(k): v for k, v in sorted(seen.statuses.items())},
        "answers_compared": seen.checked,
        "completion_tokens": sum(int(r.get("completion_tokens", 0)) for r in ledger.requests),
        "latency_ms": percentiles_ms(seen.latency_s),
        "ttft_ms": percentiles_ms(seen.ttft_s),
        "health_ms": percentiles_ms(watch.health_s),
        "rss_mb": {"start": watch.rss_mb[0][1], "end": rss_mb},
        "rss_mb_by_minute": [round(mb, 1) for _, mb in watch.rss_mb[::60]],
        "rss_slope_mb_per_min": watch.slope_mb_per_min(),
        "open_files": {"before": descriptors, "after": settled},
        "daemon_cpu_cores": cpu_s / seconds,
        "warnings": dict(ledger.warnings),
        "exit_code": code,
        "faults": faults,
    }


def _settle(proc: Proc, descriptors: int) -> int:
    deadline = time.monotonic() + SETTLE_S
    while proc.descriptors() > descriptors and time.monotonic() < deadline:
        time.sleep(0.1)
    return proc.descriptors()


def _share(seen: soak_clients.Seen) -> float:
    cut = sum(count for kind, count in seen.kinds.items() if kind.startswith("leaves"))
    return cut / max(1, sum(seen.kinds.values()))


def _by_status(ledger: Ledger) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in ledger.requests:
        found[line["status"]] = found.get(line["status"], 0) + 1
    return dict(sorted(found.items()))


def percentiles_ms(seconds: list[float]) -> dict[str, float]:
    """p50, p99 and the longest; nothing of nothing."""
    if not seconds:
        return {}
    found = {"p50": percentile(seconds, 50), "p99": percentile(seconds, 99), "max": max(seconds)}
    return {name: round(value * 1e3, 1) for name, value in found.items()}


def table(found: dict[str, Any]) -> Iterator[str]:
    """Lines for people."""
    for name, value in found.items():
        if name in {"date", "commit", "machine", "versions", "faults"}:
            continue
        parts = value.items() if isinstance(value, dict) else [("", value)]
        yield f"{name:22} " + ", ".join(f"{key} {_number(one)}".lstrip() for key, one in parts)
    yield f"{'faults':22} {len(found['faults'])}"
    yield from (f"  {fault[:600]}" for fault in found["faults"])


def _number(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else f"{value}"


def main() -> None:
    """Run, print a table, and write one JSON object if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--clients", type=positive, default=200, help="(default 200)")
    parser.add_argument("--minutes", type=float, default=5.0, help="(default 5)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    options = parser.parse_args()
    try:
        check_json_target(options)
        if options.minutes <= 0:
            raise ConfigError("--minutes must be more than 0")
        name = Bundle.load(options.bundle).manifest.recipe.engine
        with started(options.bundle) as one:
            found = soak(one, options.clients, options.minutes * 60)
        found = {**origin(cpu_facts(), ["uvicorn", "starlette"]), "engine": name, **found}
        for line in table(found):
            say(options, line)
        finish(options, found)
    except EdgeRTError as error:
        parser.exit(2 if isinstance(error, ConfigError) else 1, f"{parser.prog}: {error}\n")
    if found["faults"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
