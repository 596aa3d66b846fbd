"""A daemon of our own for one measurement."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from edge_rt.bench.client import Address
from edge_rt.errors import EngineError

START_S, END_S = 600.0, 40.0  # a large engine loads for minutes; drain_s is 30


@dataclass(frozen=True, slots=True)
class Daemon:
    """A process of `edge-rt serve` that is ready."""

    process: subprocess.Popen[bytes]
    address: Address
    log: Path  # its stderr

    @property
    def port(self) -> int:
        """At 127.0.0.1."""
        port = urlsplit(self.address.base).port
        assert port is not None
        return port


@contextmanager
def started(bundle: Path, *options: str) -> Iterator[Daemon]:
    """`edge-rt serve` on a bundle at a free port of 127.0.0.1 until the block is left.

    EngineError if it does not start; one that comes from the block says how the daemon has ended,
    if it has.
    """
    serve = [sys.executable, "-m", "edge_rt", "serve", "--bundle", str(bundle), "--port", "0"]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(  # noqa: S603 - ourselves
                [*serve, *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C is ours, and ends it in its turn
            )
        try:
            yield Daemon(process, _wait(process, log), log)
        except EngineError as error:
            if process.poll() is None:
                raise
            raise EngineError(
                f"{error}; the daemon has ended with {process.returncode}; it said last: "
                f"{_last(log)}"
            ) from error
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path) -> Address:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        said = log.read_text(encoding="utf-8", errors="replace")
        ready = re.search(r" ready: .* at (http://127\.0\.0\.1:\d+)$", said, re.MULTILINE)
        if ready is not None:
            return Address(ready[1])
        if process.poll() is not None:
            raise EngineError("the daemon did not start")
        time.sleep(0.05)
    raise EngineError(f"the daemon was not ready after {START_S:g} s")


def _last(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"
