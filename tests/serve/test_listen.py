"""The listening socket."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from edge_rt.errors import ConfigError
from edge_rt.serve.listen import Listening
from edge_rt.serve.settings import ServerSettings


def test_small_packets_are_sent_at_once() -> None:
    bound = Listening(ServerSettings(port=0)).socket
    with bound, socket.create_connection(bound.getsockname()):
        accepted, _ = bound.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_file_of_another_daemon_stays(tmp_path: Path) -> None:
    """One that ends slowly while its successor listens already."""
    path = tmp_path / "s"
    first = Listening(ServerSettings(unix_socket=str(path)))
    first.socket.close()
    second = Listening(ServerSettings(unix_socket=str(path)))
    first.remove()
    assert path.exists()
    with pytest.raises(ConfigError, match="somebody listens there already"):
        Listening(ServerSettings(unix_socket=str(path)))
    second.socket.close()
    second.remove()
    assert not path.exists()
    second.remove()


def test_what_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="something is there that is no socket"):
        Listening(ServerSettings(unix_socket=str(path)))
    assert path.read_text() == "mine"


def test_a_host_that_is_no_name() -> None:
    with pytest.raises(ConfigError, match="cannot listen at"):
        Listening(ServerSettings(host="a" * 70, api_keys_file="k"))
