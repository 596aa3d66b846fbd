#!/usr/bin/env python3
"""Copy what edge_rt reads of this board's sensors, as a tree that its tests can read.

    PYTHONPATH=. python3 tools/capture_board.py agx-orin.tar.gz    # or a directory, not there yet

Takes the nodes that the readers read and the links that lead to them, nothing else; the serial
number becomes zeros. CAPTURE.txt in the tree says what was taken, what could not be read, and why.
Run it in a checkout, with Python 3.10 or newer and nothing installed, as the user that the daemon
runs as: root sees more.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeVar

from edge_rt.power.board import open_board
from edge_rt.power.nvpmodel import CONFIGURATION
from edge_rt.power.rounds import CLASSES
from edge_rt.power.settings import BoardSettings
from edge_rt.power.watch import Watch

T = TypeVar("T")
MAX_BYTES = 1 << 17
SERIAL_NODE = "serial-number"
OUTPUTS = {
    "tegrastats.txt": ("tegrastats", "--interval", "500"),
    "nvpmodel-q.txt": ("nvpmodel", "-q"),
}
OUTPUT_S = 3.0  # tegrastats goes on until it is stopped


class Recorder(Watch):
    """What the readers ask for, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, None] = {}

    def ask(self, name: str, call: Callable[[], T]) -> T:
        """As Watch, and remember it."""
        self.asked[name] = None
        found = super().ask(name, call)
        if isinstance(found, list) and "*" not in name:
            del self.asked[name]  # a directory, of which the nodes are asked for by themselves
        return found


class Capture:
    """A copy of part of `root` in `tree`, in which links are relative."""

    def __init__(self, root: Path, tree: Path) -> None:
        self._root, self._tree = root, tree
        self._serials: set[bytes] = set()
        self.taken: list[str] = []
        self.failed: dict[str, str] = {}

    def nodes(self, asked: list[str]) -> None:
        """Copy each node, and each directory that matches a pattern."""
        serials = [name for name in asked if name.endswith(SERIAL_NODE)]
        for name in [*serials, *(name for name in asked if name not in serials)]:
            if "*" in name:
                for path in sorted(self._root.glob(name)):
                    self._place(str(path.relative_to(self._root)))
            elif name not in CLASSES and os.path.lexists(self._root / name):
                self._copy(name)

    def output(self, name: str, command: tuple[str, ...]) -> None:
        """What a tool prints, if the machine has it."""
        try:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError as error:
            self.failed[" ".join(command)] = error.strerror or "?"
            return
        try:
            printed, _ = child.communicate(timeout=OUTPUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            printed, _ = child.communicate()
        (self._tree / name).write_bytes(self._without_serial(printed[:MAX_BYTES]))
        self.taken.append(name)

    def _copy(self, name: str) -> None:
        place = self._place(name)
        target = self._tree / place
        try:
            with (self._root / place).open("rb", buffering=0) as node:
                held = node.read(MAX_BYTES) or b""
        except OSError as error:
            self.failed[name] = error.strerror or type(error).__name__
            if not target.exists():
                target.touch()  # an empty node cannot be read either
            return
        if name.endswith(SERIAL_NODE):
            number = held.strip(b"\0\n ")
            if number:
                self._serials.add(number)
        target.write_bytes(self._without_serial(held))
        self.taken.append(name)

    def _without_serial(self, held: bytes) -> bytes:
        for number in self._serials:
            held = held.replace(number, b"0" * len(number))
        return held

    def _place(self, name: str) -> str:
        """Make the links and directories that lead to it; where it really lies in the tree."""
        left, here = list(PurePosixPath(name).parts), PurePosixPath()
        while left:
            part = left.pop(0)
            if part == "..":
                here = here.parent
                continue
            path = here / part
            source = self._root / path
            if source.is_symlink():
                target = str(source.readlink())
                absolute = target.startswith("/")
                self._link(path, target.lstrip("/") if absolute else str(here / target))
                left = [*PurePosixPath(target.lstrip("/")).parts, *left]
                here = PurePosixPath() if absolute else here
                continue
            if left or source.is_dir():
                (self._tree / path).mkdir(parents=True, exist_ok=True)
            here = path
        return str(here)

    def _link(self, path: PurePosixPath, target: str) -> None:
        link = self._tree / path
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(self._tree / target, link.parent))


def capture(root: Path, tree: Path) -> Capture:
    """What the readers read of the machine at `root`, below `tree`."""
    watch = Recorder()
    board = open_board(BoardSettings(root=str(root)), watch)
    board.read()
    board.close()
    taken = Capture(root, tree)
    taken.nodes([*watch.asked, CONFIGURATION])  # a link, whose end is what was asked for
    if root == Path("/"):
        for name, command in OUTPUTS.items():
            taken.output(name, command)
    lines = [*taken.taken, *(f"could not be read: {n}: {why}" for n, why in taken.failed.items())]
    (tree / "CAPTURE.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return taken


def _main() -> Iterator[str]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="a directory or a .tar.gz; neither may be there")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where sys, proc and etc lie")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} is there already; name another")
    for directory in (options.out.parent, options.root):
        if not directory.is_dir():
            parser.error(f"{directory} is no directory")
    with tempfile.TemporaryDirectory() as temporary:
        is_archive = options.out.name.endswith((".tar.gz", ".tgz"))
        tree = Path(temporary) / "board" if is_archive else options.out
        tree.mkdir(parents=True)
        taken = capture(options.root, tree)
        if is_archive:
            name = re.sub(r"\.(tar\.gz|tgz)$", "", options.out.name)
            with tarfile.open(options.out, "w:gz") as archive:
                archive.add(tree, name, filter=_nobodys)
    yield f"{options.out}: {len(taken.taken)} nodes; the serial number is zeros"
    for name, why in taken.failed.items():
        yield f"could not be read: {name}: {why}"


def _nobodys(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in _main())
