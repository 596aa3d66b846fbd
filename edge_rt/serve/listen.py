"""Where the daemon listens."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from edge_rt.errors import ConfigError
from edge_rt.serve.settings import ServerSettings

BACKLOG = 2048


class Listening:
    """A bound socket, and `where` clients find it."""

    def __init__(self, server: ServerSettings) -> None:
        """ConfigError if the address cannot be had."""
        if server.unix_socket is None:
            self.socket, self.where, self._file = *_tcp(server.host, server.port), None
            return
        self.where = server.unix_socket
        path = Path(server.unix_socket)
        self.socket = _unix(path)
        self._file = path, _identity(path)

    def remove(self) -> None:
        """Remove a Unix socket's file, unless it is another daemon's by now."""
        if self._file is not None:
            path, identity = self._file
            with suppress(FileNotFoundError):
                if _identity(path) == identity:
                    path.unlink()


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_ctime_ns  # an inode's number is used again


def _tcp(host: str, port: int) -> tuple[socket.socket, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name for DNS
        reason = getattr(error, "strerror", None) or str(error)
        reason = reason.partition(" (")[0]  # what follows says it again
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {reason}; choose another with --host or --port"
        ) from error
    bound.set_inheritable(False)
    # Else a first token waits for the client to acknowledge the head, 40 ms: asyncio asks for this
    # only where a socket names its protocol. What is accepted inherits it.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    shown = f"[{host}]" if ":" in host else host
    return bound, f"http://{shown}:{bound.getsockname()[1]}"


def _unix(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX)
    try:
        _remove_stale(path)
        mask = os.umask(0o117)  # there must be no moment at which others can connect
        try:
            bound.bind(str(path))
        finally:
            os.umask(mask)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen at the socket {path}: {error.strerror or error}"
        ) from error
    return bound


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens at any more; OSError if somebody does."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise OSError(errno.EEXIST, "something is there that is no socket")
    with socket.socket(socket.AF_UNIX) as tried:
        try:
            tried.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, "somebody listens there already")
