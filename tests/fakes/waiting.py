"""What tests wait for, and where nobody listens."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

HANG_S = 60.0  # what is waited for comes within it, or the test fails


def eventually(is_so: Callable[[], Any], what: str = "it", within_s: float = HANG_S) -> Any:
    """Wait for a truth; its value."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if found := is_so():
            return found
        time.sleep(0.01)
    pytest.fail(f"{what} did not happen within {within_s:g} s")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
