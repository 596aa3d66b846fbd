"""Who is cut off: a client that takes nothing, never one that takes a little at a time."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from edge_rt.serve.connections import Connections

LIMIT_S = 0.3
PART = b"x" * 4096


class Transport:
    """asyncio's, whose own buffer stays as it is until the kernel's has much room."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return 1000

    def get_extra_info(self, name: str) -> Any:
        assert name == "socket"
        return self._socket

    def abort(self) -> None:
        self.is_aborted = True


class Cycle:
    response_complete = False


@dataclass(eq=False)
class Connection:
    transport: Transport
    cycle: Cycle = field(default_factory=Cycle)


def test_a_steady_reader_is_not_cut_and_one_that_stops_is() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(PART)
        connection, watch = Connection(Transport(ours)), Connections()
        end = time.monotonic() + 4 * LIMIT_S
        while time.monotonic() < end:
            assert theirs.recv(len(PART))
            watch.drop_stuck([connection], LIMIT_S)
            time.sleep(LIMIT_S / 10)
        assert not connection.transport.is_aborted
        deadline = time.monotonic() + 20
        while not connection.transport.is_aborted:
            watch.drop_stuck([connection], LIMIT_S)
            assert time.monotonic() < deadline
            time.sleep(LIMIT_S / 10)
