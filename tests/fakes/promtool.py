"""Prometheus' own checker, of Debian's package `prometheus`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def program(name: str, package: str) -> str:
    """Where a program is; the test fails without it, for what it shows would not be shown."""
    found = shutil.which(name, path="/usr/local/bin:/usr/bin:/usr/local/sbin:/usr/sbin")
    if found is None:
        pytest.fail(f"{name} is not installed; it is in the Debian package {package}")
    return found


def promtool(*arguments: str | Path, page: bytes | None = None) -> None:
    """Run it; the test fails with what it said if it finds anything at all."""
    run = subprocess.run(
        [program("promtool", "prometheus"), *map(str, arguments)],
        input=page,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    said = run.stdout.decode()
    assert run.returncode == 0, said
    assert page is None or not said, said
