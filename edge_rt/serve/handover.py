"""From the loop's thread to asyncio's, which share one interpreter.

An engine of very short steps would keep asyncio's thread waiting for the interpreter at every
system call, and would wake it more often than it can send. So what comes within EVERY_S of the last
delivery waits for the next, and the loop waits where asyncio's thread is further behind than that.
Engines whose steps are longer notice neither: each step's tokens are delivered at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

EVERY_S = 0.001
PATIENCE_S = 0.1  # the engine is not to stand still for a server that does


class Handover(Generic[T]):
    """Delivers in the running asyncio loop's thread what another thread puts in, in its order."""

    def __init__(self, deliver: Callable[[list[T]], None]) -> None:
        self._aio = asyncio.get_running_loop()
        self._deliver = deliver
        self._lock = threading.Lock()
        self._items: list[T] = []
        self._is_due = False  # a delivery
        self._delivered = threading.Event()
        self._delivered_s = 0.0

    def put(self, items: list[T]) -> None:
        """Have them delivered; may wait for what came before."""
        with self._lock:
            self._items += items
            was_due, self._is_due = self._is_due, True
        if not was_due:
            self._aio.call_soon_threadsafe(self._run)
        elif time.monotonic() - self._delivered_s > EVERY_S:
            self._delivered.clear()
            self._delivered.wait(PATIENCE_S)

    def _run(self) -> None:
        with self._lock:
            items, self._items = self._items, []
            self._is_due = bool(items)
        self._delivered_s = time.monotonic()
        self._delivered.set()
        if items:
            self._aio.call_later(EVERY_S, self._run)  # first: a delivery that fails is one only
            self._deliver(items)
