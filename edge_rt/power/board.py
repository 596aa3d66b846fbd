"""What reads the machine's sensors: a Jetson's, or another Linux machine's with its GPUs."""

from __future__ import annotations

from typing import Protocol

from edge_rt.core import BoardInfo, BoardReading
from edge_rt.power.jetson import JetsonBoard
from edge_rt.power.linux import LinuxBoard
from edge_rt.power.nodes import Nodes
from edge_rt.power.release import Identity
from edge_rt.power.settings import BoardSettings
from edge_rt.power.watch import Watch


class Board(Protocol):
    """The sensors of one machine, read by one thread.

    A sensor that is missing, fails or talks nonsense costs its own value and is named in the
    reading's `lost`; `read` raises nothing for it. `info` may say more after a later reading.
    """

    @property
    def info(self) -> BoardInfo:
        """What the machine is."""

    def read(self) -> BoardReading:
        """What its sensors say now; without energy, which is the sampler's."""

    def close(self) -> None:
        """Let go of what it has opened; any thread may call it."""


def open_board(settings: BoardSettings, watch: Watch | None = None) -> Board:
    """The sensors that this machine has; `watch` is told of each node that is being read.

    Whom nothing is to be read for (kind "none") does not call it.
    """
    nodes = Nodes(settings.root, watch or Watch())
    identity = Identity.read(nodes)
    if identity.is_jetson:
        return JetsonBoard(nodes, identity, settings.interval_s)
    return LinuxBoard(nodes, identity)
