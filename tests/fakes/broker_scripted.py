"""As much of a broker as mosquitto cannot be made to be: one that is slow, mute, or odd."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

CONNECT, PUBLISH, PINGREQ = 1, 3, 12
CONNACK = b"\x20\x03\x00\x00\x00"


class ScriptedBroker:
    """Answers CONNECT with `answers`; with one it goes on, and answers pings, and PUBLISH after a
    silence of `puback_s`; after several it ends the connection.

    With `puback_s` None it never acknowledges. `most_unacknowledged` is what the client had in
    flight at once.
    """

    def __init__(self, *answers: bytes, puback_s: float | None = None) -> None:
        self.logins: list[float] = []
        self.connects: list[bytes] = []
        self.published = self.most_unacknowledged = 0
        self._answers, self._puback_s = answers, puback_s
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = self._server.accept()
                self.logins.append(time.monotonic())
                with end, contextlib.suppress(OSError, IndexError):
                    self._talk(end)

    def _talk(self, end: socket.socket) -> None:
        waiting: list[bytes] = []
        end.settimeout(self._puback_s)
        while True:
            try:
                kind, body = _read(end)
            except TimeoutError:
                for mid in waiting:
                    end.sendall(b"\x40\x02" + mid)
                waiting.clear()
                continue
            if kind >> 4 == CONNECT:
                self.connects.append(body)
                for answer in self._answers:
                    end.sendall(answer)
                    time.sleep(0.05)
                if self._answers[1:]:
                    return
            elif kind >> 4 == PINGREQ:
                end.sendall(b"\xd0\x00")
            elif kind >> 4 == PUBLISH:
                topic = 2 + int.from_bytes(body[:2], "big")
                waiting.append(body[topic : topic + 2])
                self.published += 1
                self.most_unacknowledged = max(self.most_unacknowledged, len(waiting))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def _read(end: socket.socket) -> tuple[int, bytes]:
    """The first byte and the body of a packet; IndexError at the end."""
    kind = end.recv(1)[0]
    length = shift = 0
    while True:
        byte = end.recv(1)[0]
        length |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    body = bytearray()
    while len(body) < length:
        body.append(end.recv(1)[0])
    return kind, bytes(body)


@contextlib.contextmanager
def scripted(*answers: bytes, puback_s: float | None = None) -> Iterator[ScriptedBroker]:
    made = ScriptedBroker(*answers, puback_s=puback_s)
    try:
        yield made
    finally:
        made.close()
