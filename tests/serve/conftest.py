"""Daemons under test."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from fakes.waiting import free_port

BundleFactory = Callable[[str], Path]


@dataclass
class Daemon:
    """A process of `edge-rt serve` that is ready."""

    process: subprocess.Popen[Any]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def wait_until_ready(daemon: Daemon) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{daemon.url}/health/ready", timeout=5).status_code == 200:
                return
        assert daemon.process.poll() is None, "the daemon ended"
        assert time.monotonic() < deadline, "the daemon was not ready in time"
        time.sleep(0.05)


@contextlib.contextmanager
def started(bundle: Path, *arguments: str, stderr: IO[bytes] | None = None) -> Iterator[Daemon]:
    port = free_port()
    command = [sys.executable, "-m", "edge_rt", "serve", "--bundle", str(bundle), "--port"]
    with subprocess.Popen([*command, str(port), *arguments], stderr=stderr) as process:
        try:
            daemon = Daemon(process, port)
            wait_until_ready(daemon)
            yield daemon
        finally:
            process.kill()


@pytest.fixture(scope="session")
def daemon(demo_bundle: BundleFactory) -> Iterator[Daemon]:
    """One of the demo's CPU engine for all tests."""
    with started(demo_bundle("demo.cpu")) as one:
        yield one
