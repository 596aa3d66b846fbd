"""NVIDIA's tegrastats, for a board whose power monitors are not to be seen in sysfs.

Lines differ from JetPack to JetPack: one clock or a list of them, no load, one temperature or two,
two powers or three, of which the first is the present one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time

from edge_rt.power.child import end, start
from edge_rt.power.draft import Draft, Extra
from edge_rt.power.thermal import zone_label

TOOL = "tegrastats"
MAX_LINE = 8192
STALE_INTERVALS = 3
BACK_OFF_S = (1.0, 60.0)  # after an end that was not ours: the first, the longest
_RAIL = re.compile(r"\b([A-Z][A-Z0-9_]*) (\d{1,6})mW/\d+mW")
_ZONE = re.compile(r"\b([A-Za-z]\w*)@(-?\d{1,4}(?:\.\d+)?)C\b")
_BUSY = re.compile(r"\b(EMC|GR3D)_FREQ (?:(\d{1,3})%)?(?:@\[?(\d{1,6}))?")
_UNITS = {"EMC": "emc", "GR3D": "gpu"}


def parse(line: str) -> Extra:
    """What one line says; what it does not say, or cannot mean, is not there."""
    found = Extra()
    for label, mw in _RAIL.findall(line):
        if label != "NC":
            found.rails_mw[label] = float(mw)
    for name, degrees in _ZONE.findall(line):
        if -100 < float(degrees) < 200:  # -256: powered down
            found.temperatures_c[zone_label(name)] = float(degrees)
    for name, percent, mhz in _BUSY.findall(line):
        if percent and int(percent) <= 100:
            found.loads[_UNITS[name]] = int(percent) / 100
        if mhz and int(mhz):  # 0: powered down
            found.clocks_hz[_UNITS[name]] = int(mhz) * 1e6
    return found


class Tegrastats:
    """The tool as a child, read by a thread; started again when it ends, later each time."""

    def __init__(self, interval_s: float) -> None:
        self._tool = shutil.which(TOOL)
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._child: subprocess.Popen[str] | None = None
        self._latest: tuple[float, Extra] | None = None
        self._fault = "has not said anything yet"
        self._thread: threading.Thread | None = None

    @property
    def is_there(self) -> bool:
        """Whether the machine has the tool."""
        return self._tool is not None

    def fill(self, draft: Draft) -> None:
        """Add its last line, if that is not old; start it if it does not run."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tegrastats", daemon=True)
            self._thread.start()
        latest, limit_s = self._latest, STALE_INTERVALS * self._interval_s + 1
        if latest is not None and time.monotonic() - latest[0] <= limit_s:
            draft.fill(latest[1])
        else:
            draft.lost[TOOL] = self._fault

    def close(self) -> None:
        """End the child; it is not started again."""
        self._stop.set()
        child = self._child
        if child is not None:
            child.kill()
        if self._thread is not None:
            self._thread.join(0.5)

    def _run(self) -> None:
        wait_s = BACK_OFF_S[0]
        while not self._stop.is_set():
            lines = 0
            try:
                lines = self._read_lines()
                self._fault = "ended; it is started again"
            except OSError as error:
                self._fault = f"cannot be started: {error.strerror}"
            wait_s = BACK_OFF_S[0] if lines else min(2 * wait_s, BACK_OFF_S[1])
            self._stop.wait(wait_s)

    def _read_lines(self) -> int:
        """How many it printed before it ended."""
        assert self._tool is not None
        child = start(self._tool, "--interval", str(round(self._interval_s * 1000)))
        self._child, lines = child, 0
        try:
            assert child.stdout is not None
            while not self._stop.is_set() and (line := child.stdout.readline(MAX_LINE)):
                self._latest, lines = (time.monotonic(), parse(line)), lines + 1
        finally:
            self._child = None
            end(child)
        return lines
