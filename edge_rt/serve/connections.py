"""Connections on which nothing moves because of their client: uvicorn waits for it without end."""

from __future__ import annotations

import fcntl
import termios
import time
from array import array
from collections.abc import Iterable
from typing import Any


def _unacknowledged(connection: Any) -> int:
    """Bytes that the kernel has and the client has not taken."""
    found = array("i", [0])
    fcntl.ioctl(connection.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, found)
    return found[0]


class Connections:
    """What uvicorn's connections were waiting for when they were last looked at."""

    def __init__(self) -> None:
        self._since_s: dict[object, float] = {}

    def drop_stuck(self, connections: Iterable[Any], limit_s: float) -> None:
        """Cut those whose client has sent no whole head, or taken no byte, for `limit_s`.

        A body that does not come is the endpoint's to refuse. What is cut looks to the application
        like a client that has gone.
        """
        now_s, since_s = time.monotonic(), dict[object, float]()
        for connection in connections:
            unsent = connection.transport.get_write_buffer_size(), _unacknowledged(connection)
            cycle = connection.cycle  # one request and its answer
            if any(unsent) or cycle is None or cycle.response_complete:
                # The next request or byte makes another key, and so begins anew.
                key = connection, cycle, unsent
                since_s[key] = self._since_s.get(key, now_s)
                if now_s - since_s[key] > limit_s:
                    connection.transport.abort()
        self._since_s = since_s
