"""Nodes of sysfs and procfs: read as bytes, a bounded number of them, and never trusted.

A node is opened for each reading: a descriptor that is kept would go on answering for a device
that has gone, or has come back under another name, and opening costs a few microseconds.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_rt.power.watch import Watch

MAX_BYTES = 4096  # sysfs gives at most a page
_NUMBER = re.compile(rb"-?[0-9]{1,19}")


class NodeError(Exception):
    """A value that cannot be had now; the message says of which node, and why.

    `is_off`: the sensor says of itself that it is powered down. `is_absent`: there is nothing to
    measure: a core that is offline, a channel that is disabled.
    """

    def __init__(self, message: str, *, is_off: bool = False, is_absent: bool = False) -> None:
        super().__init__(message)
        self.is_off, self.is_absent = is_off, is_absent


class Nodes:
    """The machine's files below `root`; paths are relative to it."""

    def __init__(self, root: str, watch: Watch) -> None:
        self.root, self.watch = root, watch
        self._prefix = root.rstrip("/") + "/"

    def read(self, path: str, limit: int = MAX_BYTES) -> bytes:
        """Its first `limit` bytes; NodeError."""
        try:
            return self.watch.ask(path, lambda: _read(self._prefix + path, limit))
        except OSError as error:
            is_off = error.errno == errno.EAGAIN  # a thermal zone whose part is powered down
            raise NodeError(f"{path}: {os.strerror(error.errno or 0)}", is_off=is_off) from error

    def text(self, path: str, limit: int = MAX_BYTES) -> str:
        """It as text without white space around it, which a NUL is too; NodeError if empty."""
        found = self.read(path, limit).decode("utf-8", "replace").replace("\0", " ").strip()
        if not found:
            raise NodeError(f"{path}: empty")
        return found

    def word(self, path: str) -> str | None:
        """A short text that can be printed, or None, whyever."""
        try:
            found = self.text(path)
        except NodeError:
            return None
        return found if len(found) <= 128 and found.isprintable() else None

    def number(self, path: str, lowest: int, highest: int) -> int:
        """A whole number; NodeError if it is none, or not within the two."""
        found = self.read(path, 64).strip()
        if not _NUMBER.fullmatch(found):
            raise NodeError(f"{path}: {f'no number: {found[:16]!r}' if found else 'empty'}")
        value = int(found)
        if not lowest <= value <= highest:
            raise NodeError(f"{path}: {value} cannot be, it is not {lowest} to {highest}")
        return value

    def find(self, pattern: str) -> list[str]:
        """Paths that match, hwmon2 before hwmon10."""
        try:
            found = self.watch.ask(pattern, lambda: glob.glob(pattern, root_dir=self.root))  # noqa: PTH207
        except (OSError, NodeError):
            return []
        return sorted(found, key=_natural)


class Family:
    """Values of one kind by label: what gives each of them, and whether it ever did.

    One that is `expected`, or was found, and cannot be read is lost; but of those that are not
    expected one that is off is only lost if it was read before, and one that is absent never.
    """

    def __init__(self, kind: str, expected: Iterable[str] = ()) -> None:
        self.kind, self.expected = kind, frozenset(expected)
        self.found: dict[str, Callable[[], float]] = {}
        self._read: set[str] = set()

    def read(self, values: dict[str, float], lost: dict[str, str]) -> None:
        """Put those that answer into `values` and why the others do not into `lost`."""
        for label, ask in self.found.items():
            try:
                values[label] = ask()
            except NodeError as error:
                is_known = label in self._read and not error.is_absent
                if is_known or label in self.expected or not (error.is_off or error.is_absent):
                    lost[f"{self.kind}.{label}"] = str(error)
            else:
                self._read.add(label)
        for label in self.expected - self.found.keys():
            lost[f"{self.kind}.{label}"] = "not found"


def _read(path: str, limit: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)


def _natural(path: str) -> list[tuple[str, int]]:
    parts = re.findall(r"(\D*)(\d*)", path)
    return [(word, int(digits or -1)) for word, digits in parts]
