"""What telemetry costs the daemon: of its throughput, and of a core while nothing runs.

    python tools/telemetry_cost.py NULL_BUNDLE --root TREE --json telemetry_cost.json

Two daemons of the null engine, one with MQTT to a mosquitto of its own and sensors read, the other
with neither, take turns at streams; then both are left alone. `--root` is where the sensors lie, a
real board's / or a fixture tree. The interval is ten times as short as the default.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import command
from command import progress
from serve_speed import stream_all

from edge_rt.bench import daemon
from edge_rt.bench.daemon import Daemon
from edge_rt.cli.output import positive
from edge_rt.errors import EngineError

INTERVAL_S = 1.0
SETTINGS = """\
[telemetry]
interval_s = {interval_s}

[board]
root = "{root}"

[mqtt]
host = "127.0.0.1"
port = {port}
device = "cost"
spool_file = "{directory}/spool.sqlite"
"""
TICKS_S = os.sysconf("SC_CLK_TCK")


class Broker:
    """A mosquitto on a free port of 127.0.0.1, with lines of its own in its file."""

    def __init__(self, directory: Path, *lines: str) -> None:
        found = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
        if found is None:
            raise EngineError("mosquitto is not installed: apt install mosquitto")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        file = directory / "mosquitto.conf"
        held = ["user root", *lines, f"listener {self.port} 127.0.0.1", "allow_anonymous true"]
        file.write_text("\n".join(held) + "\n", "utf-8")
        self._command = [found, "-c", str(file)]
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Wait until it listens."""
        self.process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            if self.process.poll() is not None:
                raise EngineError("mosquitto does not start")
            time.sleep(0.05)

    def kill(self) -> None:
        """As a power cut."""
        self.process.kill()
        self.process.wait()


def cpu_s(one: Daemon) -> float:
    """CPU time of a daemon."""
    stat = Path(f"/proc/{one.process.pid}/stat").read_text(encoding="ascii")
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS_S


def take_turns(
    daemons: dict[str, Daemon], streams: int, tokens: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Streams on each of them in turn, for so long in all."""
    times: dict[str, list[float]] = {name: [] for name in daemons}
    spent = dict.fromkeys(daemons, 0.0)
    for one in daemons.values():
        stream_all(("127.0.0.1", one.port), streams, tokens)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, one in daemons.items():
            before = cpu_s(one)
            times[name].append(stream_all(("127.0.0.1", one.port), streams, tokens))
            spent[name] += cpu_s(one) - before
    made = streams * tokens
    return {
        name: {
            "rounds": len(found),
            "tokens_per_s": made / statistics.median(found),
            "cpu_us_per_token": spent[name] / (made * len(found)) * 1e6,
        }
        for name, found in times.items()
    }


def idle(daemons: dict[str, Daemon], seconds: float) -> dict[str, float]:
    """Share of a core that each takes while nothing runs."""
    before, begun = {name: cpu_s(one) for name, one in daemons.items()}, time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - begun
    return {name: (cpu_s(one) - before[name]) / took_s for name, one in daemons.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both, in one run."""
    if not options.root.is_dir():
        raise EngineError(f"--root: there is no directory '{options.root}'")
    with tempfile.TemporaryDirectory() as name, Broker(Path(name)) as broker:
        file = Path(name) / "settings.toml"
        settings = SETTINGS.format(
            interval_s=INTERVAL_S, root=options.root.resolve(), port=broker.port, directory=name
        )
        file.write_text(settings, encoding="utf-8")
        with (
            daemon.started(options.bundle, "--config", str(file)) as full,
            daemon.started(options.bundle, "--board", "none") as bare,
        ):
            daemons = {"with": full, "without": bare}
            progress("streams")
            streams = take_turns(daemons, options.streams, options.tokens, options.seconds)
            progress("nothing")
            at_rest = idle(daemons, options.idle_seconds)
    return {
        "interval_s": INTERVAL_S,
        "streams": streams,
        "throughput_ratio": streams["with"]["tokens_per_s"] / streams["without"]["tokens_per_s"],
        "cpu_ratio": streams["with"]["cpu_us_per_token"] / streams["without"]["cpu_us_per_token"],
        "idle_cores": at_rest,
        "idle_cores_of_telemetry": at_rest["with"] - at_rest["without"],
        "load_1_min": os.getloadavg()[0],
    }


def main() -> None:
    """Measure, and write one JSON object to stdout or to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, metavar="NULL_BUNDLE")
    parser.add_argument("--root", type=Path, default=Path("/"), metavar="DIR")
    parser.add_argument("--streams", type=positive, default=8, metavar="N")
    parser.add_argument("--tokens", type=positive, default=500, metavar="N")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S")
    parser.add_argument("--idle-seconds", type=float, default=60.0, metavar="S")
    command.run(parser, measure)


if __name__ == "__main__":
    main()
