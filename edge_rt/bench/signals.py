"""Interrupts that wait until work which cannot be left anywhere has come to its end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def signals_held(stop: Callable[[], None]) -> Iterator[None]:
    """Let an interrupt `stop` the work, and pass it on when the block has been left.

    As an exception it could come between two calls that belong together. A second signal finds its
    old handler.
    """
    old: dict[int, Any] = {}
    came: list[int] = []

    def restore() -> None:
        for number, handler in old.items():
            signal.signal(number, handler)
        old.clear()

    def hold(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        restore()
        stop()

    if threading.current_thread() is threading.main_thread():  # no other gets signals
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):  # neither ignored nor deadly
                old[number] = handler
                signal.signal(number, hold)
    try:
        yield
    finally:
        restore()
        if came:
            signal.raise_signal(came[0])
            # By a handler that returns; the work was cut short all the same.
            raise KeyboardInterrupt
