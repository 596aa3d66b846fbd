"""The log on stderr, written by a thread of its own: nobody waits for who reads it."""

from __future__ import annotations

import logging
import logging.handlers
import os
import queue
import sys
import threading
from contextlib import suppress

from edge_rt.serve.journal import JournalFormatter

LINES = 10_000  # that may wait to be written
STOP_S = 1.0


class Log:
    """What all loggers write to from `start` on; with journald's priorities if it is the reader."""

    def __init__(self) -> None:
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(LINES)
        self._handler = _Dropping(self._lines)
        self._stderr = logging.StreamHandler(sys.stderr)
        if "JOURNAL_STREAM" in os.environ:
            self._stderr.setFormatter(JournalFormatter("%(name)s: %(message)s"))
        else:
            form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
            self._stderr.setFormatter(logging.Formatter(form))
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)

    def start(self, level: str) -> None:
        """Take over from what there is."""
        logging.getLogger().handlers[:] = [self._handler]
        self.set_level(level)
        for name in ("uvicorn", "asyncio"):  # starts and stops; their warnings are kept
            logging.getLogger(name).setLevel(logging.WARNING)
        self._thread.start()

    def set_level(self, level: str) -> None:
        """The least that is written."""
        logging.getLogger().setLevel(level.upper())

    def stop(self) -> bool:
        """Write what waits; False if its reader does not take it within STOP_S."""
        with suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(STOP_S)
        return not self._thread.is_alive()

    def _write(self) -> None:
        told = 0
        while (record := self._lines.get()) is not None:
            self._stderr.handle(record)
            if (dropped := self._handler.dropped) > told:
                what = f"{dropped - told} lines were dropped: nobody read the log"
                told = dropped
                line = logging.LogRecord(__name__, logging.WARNING, __file__, 0, what, None, None)
                self._stderr.handle(line)


class _Dropping(logging.handlers.QueueHandler):
    """Loses a line rather than to wait."""

    dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        """As its base has it, but for the end."""
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
