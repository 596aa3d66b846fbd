"""What a broker said before it closed, when a write failed before that was read.

The kernel keeps it; paho closes the socket without a look. The reason would be lost (taken over,
not authorized), and so would acknowledgements, whose records would be sent again.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode

_MOST_BYTES = 65_536


class LastWord(NamedTuple):
    """A PUBACK of the packet `mid`, or a DISCONNECT."""

    code: ReasonCode
    mid: int | None


def last_words(closing: socket.socket) -> Iterator[LastWord]:
    """Without waiting; nothing if there is nothing, or nothing that can be understood."""
    rest = b""
    with suppress(OSError):  # of TLS too
        closing.setblocking(False)
        rest = closing.recv(_MOST_BYTES)
    with suppress(KeyError, ValueError, IndexError):
        while rest:
            kind, length = rest[0] >> 4, rest[1]
            body, rest = rest[2 : 2 + length], rest[2 + length :]
            if length >= 128 or len(body) < length:
                return
            if kind == PacketTypes.PUBACK:
                code = body[2] if length > 2 else 0
                mid = int.from_bytes(body[:2], "big")
                yield LastWord(ReasonCode(PacketTypes.PUBACK, identifier=code), mid)
            elif kind == PacketTypes.DISCONNECT:
                code = body[0] if body else 0
                yield LastWord(ReasonCode(PacketTypes.DISCONNECT, identifier=code), None)
