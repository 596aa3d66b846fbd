"""The socket that the daemon listens at."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from edge_rt.errors import ConfigError
from edge_rt.serve.settings import ServerSettings

BACKLOG = 2048


def listen(server: ServerSettings) -> tuple[socket.socket, str]:
    """A bound socket, and where it is; ConfigError if the address cannot be had."""
    if server.unix_socket is not None:
        return _unix(Path(server.unix_socket)), server.unix_socket
    try:
        family, _, _, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # what follows says it again
        raise ConfigError(
            f"cannot listen at {server.host}, port {server.port}: {reason}; "
            f"choose another with --host or --port"
        ) from error
    bound.set_inheritable(False)
    # Else a first token waits for the client to acknowledge the head, 40 ms: asyncio asks for this
    # only where a socket names its protocol. What is accepted inherits it.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    port = bound.getsockname()[1]
    host = f"[{server.host}]" if ":" in server.host else server.host
    return bound, f"http://{host}:{port}"


def remove(server: ServerSettings) -> None:
    """Remove the file of a Unix socket that is listened at no more."""
    if server.unix_socket is not None:
        Path(server.unix_socket).unlink(missing_ok=True)


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
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX) as tried:
        try:
            tried.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(98, os.strerror(98))
