"""The listening socket."""

from __future__ import annotations

import socket

from edge_rt.serve.listen import listen
from edge_rt.serve.settings import ServerSettings


def test_small_packets_are_sent_at_once() -> None:
    bound, _ = listen(ServerSettings(port=0))
    with bound, socket.create_connection(bound.getsockname()):
        accepted, _ = bound.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
