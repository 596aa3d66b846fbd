"""What the reading thread is inside of, so that what does not answer costs only itself.

A read of a node may block for ever, and no thread can be stopped from outside. So another thread
asks `give_up()` now and then: once a call has lasted `PATIENCE_S`, the thread that is in it is
disowned, and its call's name is not asked again for RETRY_S, nor as long as that thread has not
come back. A disowned thread that does come back is thrown out by Disowned before it changes
anything, and so the board that it was reading can go on with a new thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from edge_rt.power.nodes import NodeError

T = TypeVar("T")
PATIENCE_S = 1.0
RETRY_S = 60.0


class Disowned(BaseException):
    """Another thread reads now. Not an Exception: nothing may handle it but the thread's end."""


class Watch:
    """One reading thread at a time, and what it asks; without `claim()` any thread may ask."""

    def __init__(
        self, retry_s: float = RETRY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._retry_s, self._clock = retry_s, clock
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._is_claimed = False
        self._inside: tuple[str, float] | None = None
        self._until: dict[str, float] = {}  # when what did not answer may be asked again
        self._stuck: dict[str, threading.Thread | None] = {}  # who is in it still

    def claim(self) -> None:
        """The calling thread is the reader from now on."""
        with self._lock:
            self._is_claimed, self._inside = True, None
            self._reader = threading.current_thread()

    def ask(self, name: str, call: Callable[[], T]) -> T:
        """What `call` returns; NodeError, without a call, if `name` did not answer before."""
        me = threading.current_thread()
        with self._lock:
            self._check(me)
            if name in self._until:
                if name in self._stuck or self._clock() < self._until[name]:
                    raise NodeError(f"{name}: does not answer")
                del self._until[name]
            self._inside = (name, self._clock())
        try:
            return call()
        finally:
            with self._lock:
                if self._stuck.get(name) is me:
                    del self._stuck[name]
                self._check(me)
                self._inside = None

    def give_up(self) -> str | None:
        """Disown a reader that has waited too long; what for, or None if it has not."""
        with self._lock:
            if self._inside is None or self._clock() - self._inside[1] < PATIENCE_S:
                return None
            name = self._inside[0]
            self._until[name] = self._clock() + self._retry_s
            self._stuck[name] = self._reader
            self._is_claimed, self._inside, self._reader = True, None, None
            return name

    def silent(self) -> list[str]:
        """What is not asked now, because it did not answer."""
        with self._lock:
            now = self._clock()
            return [
                name for name, until in self._until.items() if name in self._stuck or now < until
            ]

    @property
    def stuck(self) -> int:
        """How many threads have not come back."""
        return len(self._stuck)

    def _check(self, me: threading.Thread) -> None:
        if self._is_claimed and self._reader is not me:
            raise Disowned
