"""What a broker said before it closed, when a write failed before that was read.

The kernel keeps it; paho closes the socket without a look. The reason would be lost (taken over,
not authorized), and so would acknowledgements, whose records would be sent again, and the TLS alert
that says what is wrong with a certificate.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode

_MOST_BYTES = 65_536
_REJECTION = re.compile(r"_ALERT_(\w*(?:CERTIFICATE|UNKNOWN_CA|ACCESS_DENIED)\w*)")


class LastWord(NamedTuple):
    """A PUBACK of the packet `mid`, or a DISCONNECT."""

    code: ReasonCode
    mid: int | None


def last_words(closing: socket.socket) -> Iterator[LastWord]:
    """Without waiting; nothing if there is nothing, or nothing that can be understood.

    ssl.SSLError if it is an alert about our certificate.
    """
    rest = b""
    try:
        closing.setblocking(False)
        rest = closing.recv(_MOST_BYTES)
    except ssl.SSLError as error:
        if rejection(str(error)):
            raise
    except OSError:
        pass
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


def rejection(said: str) -> str:
    """What OpenSSL's text says of a TLS alert about our certificate; empty if it is none."""
    found = _REJECTION.search(said)
    return found[1].replace("_", " ").lower() if found else ""
