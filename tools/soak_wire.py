"""HTTP/1.1 for clients that may stop anywhere: bytes out, and the answer piece by piece."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Head:
    """What comes before an answer's body."""

    status: int
    fields: Mapping[str, str]


class Wire:
    """A connection to the daemon."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int, *, small: bool = False) -> Wire:
        """`small` buffers make a client that reads slowly felt by the daemon."""
        sock = socket.socket()
        sock.setblocking(False)
        if small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except BaseException:
            sock.close()
            raise
        return cls(*await asyncio.open_connection(sock=sock, limit=4096 if small else 65536))

    async def send(self, data: bytes) -> None:
        """Hand bytes to the kernel."""
        self._writer.write(data)
        await self._writer.drain()

    async def head(self) -> Head:
        """Status and header fields."""
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines[1:] if line)
        return Head(
            int(lines[0].split(" ")[1]), {key.lower(): value.strip() for key, _, value in fields}
        )

    async def pieces(self, head: Head) -> AsyncIterator[bytes]:
        """The body as it comes: the chunks of a stream, or all of it."""
        if "chunked" not in head.fields.get("transfer-encoding", ""):
            length = head.fields.get("content-length")
            yield await (self._reader.read() if length is None else self._read(int(length)))
            return
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._read(size + 2))[:-2]
        await self._read(2)

    async def _read(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def all(self) -> tuple[Head, bytes]:
        """A whole answer."""
        head = await self.head()
        return head, b"".join([piece async for piece in self.pieces(head)])

    def close(self) -> None:
        """At once; the kernel resets the connection where something is unread."""
        self._writer.transport.abort()


def request(body: Any, method: str = "POST", path: str = PATH) -> tuple[bytes, bytes]:
    """Head and body."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: soak\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode(), content
