"""The power mode's name, as `nvpmodel` sets it.

Read from the tool's own files: it takes a second, and longer while the GPU is busy (JS#721). Where
those are not to be seen the tool is asked, and never waited for.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import subprocess
import time

from edge_rt.power.child import end, start
from edge_rt.power.nodes import NodeError, Nodes

STATUS = "var/lib/nvpmodel/status"
CONFIGURATION = "etc/nvpmodel.conf"
COMMAND = ("nvpmodel", "-q")
QUERY_INTERVAL_S = 60.0
QUERY_LIMIT_S = 20.0
MAX_BYTES = 1 << 17


def mode_names(configuration: str) -> dict[int, str]:
    """Names by number: of lines as `< POWER_MODEL ID=0 NAME=MAXN_SUPER >`, whatever the name."""
    found = re.findall(r"^\s*<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)", configuration, re.MULTILINE)
    return {int(number): name for number, name in found}


def parse_query(output: str) -> str | None:
    """The name in what `nvpmodel -q` prints; its lines of warnings are not it (JS#148)."""
    found = re.search(r"^NV Power Mode:[ \t]*(\S.*?)\s*$", output, re.MULTILINE)
    return None if found is None else found[1]


class PowerMode:
    """Which mode is set; a mode may be changed at any time."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._names: dict[int, str] = {}
        self._query = Query() if nodes.root == "/" else None  # the tool is this machine's
        self._was_known = False

    def find(self) -> None:
        """Read the modes' names."""
        with contextlib.suppress(NodeError):
            self._names = mode_names(self._nodes.text(self._configuration(), MAX_BYTES))

    def read(self, lost: dict[str, str]) -> str | None:
        """Its name; None if it is not known."""
        name: str | None = None
        try:
            name = self._of_status()
        except NodeError as error:
            if self._query is not None:
                name = self._query.answer()
            is_hidden = isinstance(error.__cause__, FileNotFoundError) and not self._was_known
            if name is None and not is_hidden:
                lost["power_mode"] = str(error)
        self._was_known = self._was_known or name is not None
        return name

    def close(self) -> None:
        """End the tool, if it runs."""
        if self._query is not None:
            self._query.close()

    def _of_status(self) -> str:
        text = self._nodes.text(STATUS)
        found = re.match(r"pmode:(\d{1,9})\b", text)
        if found is None:
            raise NodeError(f"{STATUS}: no pmode: {text[:16]!r}")
        number = int(found[1])
        if number not in self._names:
            raise NodeError(f"{CONFIGURATION}: no name for mode {number}")
        return self._names[number]

    def _configuration(self) -> str:
        """Where it lies: a link to /etc/nvpmodel/… leads there under the root too."""
        path = os.path.join(self._nodes.root, CONFIGURATION)  # noqa: PTH118
        target = os.readlink(path) if os.path.islink(path) else ""  # noqa: PTH114, PTH115
        return target.lstrip("/") if target.startswith("/") else CONFIGURATION


class Query:
    """`nvpmodel -q` in a process of its own, asked now and then."""

    def __init__(self) -> None:
        self._tool = shutil.which(COMMAND[0])
        self._child: subprocess.Popen[str] | None = None
        self._asked_s = -math.inf
        self._name: str | None = None

    def answer(self) -> str | None:
        """What it said last; asks it again if that is long ago."""
        since_s = time.monotonic() - self._asked_s
        if self._child is not None:
            if self._child.poll() is not None:
                self._name = parse_query(self._child.communicate()[0])
                self._child = None
            elif since_s > QUERY_LIMIT_S:
                self._name = None
                self.close()
        elif self._tool is not None and since_s >= QUERY_INTERVAL_S:
            self._asked_s = time.monotonic()
            with contextlib.suppress(OSError):
                self._child = start(self._tool, *COMMAND[1:])
        return self._name

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            end(self._child)
            self._child = None
