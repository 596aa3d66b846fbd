"""Tools of the machine that are run for their output."""

from __future__ import annotations

import contextlib
import subprocess

LAST_S = 0.3  # what a killed process has to be gone


def start(*command: str) -> subprocess.Popen[str]:
    """Its output is text, its errors are not looked at; OSError if it cannot be started."""
    return subprocess.Popen(  # noqa: S603 - a tool's own path
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        errors="replace",
    )


def end(child: subprocess.Popen[str]) -> None:
    """Kill it; one that the kernel holds is not waited for."""
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(LAST_S)
    if child.stdout is not None:
        child.stdout.close()
