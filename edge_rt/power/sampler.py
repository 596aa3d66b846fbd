"""Reads the board every so often, in a thread that may hang without holding up anyone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from edge_rt.core import BoardInfo, BoardReading
from edge_rt.power.board import Board
from edge_rt.power.energy import Energy
from edge_rt.power.watch import PATIENCE_S, Disowned, Watch

logger = logging.getLogger(__name__)

STALE_INTERVALS = 3
MAX_STUCK = 4  # threads that hang in a node each; then nothing more is read until one comes back
CHECK_S = PATIENCE_S / 2
STOP_S = 0.4  # that the reader, and then the board's end, have

Latest = tuple[BoardInfo, BoardReading]


class Sampler:
    """A board and its last reading, with the energy since the first.

    `open_board` is called in the reading thread, for it reads nodes too; it gets the watch that it
    must tell of them. `stop()` takes less than a second, whatever hangs.
    """

    def __init__(
        self, open_board: Callable[[Watch], Board], interval_s: float, watch: Watch | None = None
    ) -> None:
        self._open_board, self._interval_s = open_board, interval_s
        self._watch = watch or Watch()
        self._energy = Energy(STALE_INTERVALS * interval_s)
        self._stop = threading.Event()
        self._board: Board | None = None
        self._latest: Latest | None = None
        self._started_ns = time.monotonic_ns()
        self._faults: set[str] = set()
        self._reader: threading.Thread | None = None
        self._guard = threading.Thread(target=self._watch_over, name="board-watch", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._started_ns = time.monotonic_ns()
        self._new_reader()
        self._guard.start()

    def latest(self) -> Latest | None:
        """What the board is and its last reading; None before the first.

        Of a reading that is older than three intervals nothing is left but that it is.
        """
        latest, now_ns = self._latest, time.monotonic_ns()
        since_ns = self._started_ns if latest is None else latest[1].taken_ns
        silent_s = (now_ns - since_ns) * 1e-9
        if silent_s <= STALE_INTERVALS * self._interval_s:
            return latest
        info = BoardInfo("none") if latest is None else latest[0]
        lost = {"sensors": f"have not answered for {silent_s:.0f} s"}
        return info, BoardReading(since_ns, lost=lost)

    def stop(self) -> None:
        """Read no more, and let go of the board."""
        self._stop.set()
        if self._guard.is_alive():
            self._guard.join(STOP_S)
        reader, board = self._reader, self._board
        if reader is not None:
            reader.join(STOP_S)
        if board is not None:  # closing may hang as reading does
            closing = threading.Thread(target=board.close, name="board-close", daemon=True)
            closing.start()
            closing.join(STOP_S)

    def _new_reader(self) -> None:
        self._reader = threading.Thread(target=self._read, name="board", daemon=True)
        self._reader.start()

    def _watch_over(self) -> None:
        is_held_back = False
        while not self._stop.wait(CHECK_S):
            name = self._watch.give_up()
            if name is not None:
                logger.warning("board sensors: %s does not answer", name)
            if name is not None or is_held_back:
                is_held_back = self._watch.stuck >= MAX_STUCK
                if not is_held_back:
                    self._new_reader()

    def _read(self) -> None:
        self._watch.claim()
        due_s = time.monotonic()
        with suppress(Disowned):
            while not self._stop.is_set():
                self._read_once()
                due_s = max(due_s + self._interval_s, time.monotonic())
                self._stop.wait(due_s - time.monotonic())

    def _read_once(self) -> None:
        try:
            if self._board is None:
                self._board = self._open_board(self._watch)
            reading = self._energy.add(self._with_silent(self._board.read()))
            self._latest = (self._board.info, reading)
        except Exception as error:  # a fault of ours; telemetry goes on
            fault = type(error).__name__
            if fault not in self._faults:  # each kind once, not each second
                self._faults.add(fault)
                logger.exception("the board's sensors cannot be read")

    def _with_silent(self, reading: BoardReading) -> BoardReading:
        """A node that hangs may be one that only leads to others: then it is named itself."""
        told = " ".join(reading.lost.values())
        silent = {name: "does not answer" for name in self._watch.silent() if name not in told}
        return replace(reading, lost={**reading.lost, **silent}) if silent else reading
