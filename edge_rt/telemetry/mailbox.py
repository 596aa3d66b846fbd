"""What other threads hand to the publisher's, which it waits for together with the network."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from edge_rt.telemetry.connection import Message
from edge_rt.telemetry.record import Record

MAX_RECORDS = 10_000  # only a stuck disk fills it


class State(NamedTuple):
    """What the daemon is, since when."""

    name: str
    since_ms: int


class Mailbox:
    """Any thread puts in, without waiting; one takes out."""

    def __init__(self) -> None:
        self.dropped = 0  # records, the oldest first
        self._lock = threading.Lock()
        self._records: deque[Record] = deque()
        self._messages: deque[Message] = deque()
        self._state = State("loading", _now_ms())
        self._stop_s: float | None = None
        self._awake, self._waker = socket.socketpair()
        self._awake.setblocking(False)
        self._waker.setblocking(False)

    def put_record(self, record: Record) -> None:
        """For the spool."""
        with self._lock:
            if len(self._records) >= MAX_RECORDS:
                self._records.popleft()
                self.dropped += 1
            self._records.append(record)
        self.wake()

    def put_message(self, message: Message) -> None:
        """To be sent as it is."""
        with self._lock:
            self._messages.append(message)
        self.wake()

    def set_state(self, name: str) -> None:
        """The state that is told from now on."""
        with self._lock:
            if name != self._state.name:
                self._state = State(name, _now_ms())
        self.wake()

    def stop(self, at_s: float) -> None:
        """End the thread by then (time.monotonic)."""
        with self._lock:
            self._stop_s = at_s
        self.wake()

    @property
    def state(self) -> State:
        """The last one."""
        return self._state

    @property
    def stop_s(self) -> float | None:
        """When all must be over; None: go on."""
        return self._stop_s

    def take_records(self) -> list[Record]:
        """All that came, in order."""
        with self._lock:
            taken = list(self._records)
            self._records.clear()
        return taken

    def take_messages(self) -> list[Message]:
        """All that came, in order."""
        with self._lock:
            taken = list(self._messages)
            self._messages.clear()
        return taken

    def wake(self) -> None:
        """End the wait."""
        with suppress(OSError):  # full, so that it wakes anyway; or closed
            self._waker.send(b"\0")

    def wait(self, fileno: int, wants_write: bool, timeout_s: float) -> bool:
        """Sleep until something was put in or the socket is ready; whether there is something to
        read from it. poll(2) has no limit on numbers, and no state that could be stale.
        """
        poll = select.poll()
        poll.register(self._awake, select.POLLIN)
        if fileno >= 0:
            poll.register(fileno, select.POLLIN | (select.POLLOUT if wants_write else 0))
        ready = dict(poll.poll(max(0.0, timeout_s) * 1000))
        if self._awake.fileno() in ready:
            with suppress(BlockingIOError):
                self._awake.recv(4096)
        return bool(ready.get(fileno, 0) & ~select.POLLOUT)

    def close(self) -> None:
        """Nothing wakes any more."""
        self._awake.close()
        self._waker.close()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
