"""Whose listening sockets are closed to strangers."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

pytest.importorskip("torch.distributed")

from commsched.transports.backends.gloo.listener import ListeningSocket, _as_gloo_writes


def test_who_begins_to_listen_meanwhile_is_left_alone() -> None:
    listener = ListeningSocket(lambda: [socket.create_server(("127.0.0.1", 0)) for _ in range(2)])
    ours, other = listener.made
    with closing(ours), closing(other), closing(listener):
        listener.ignore_strangers(_as_gloo_writes(ours))
        with pytest.raises(TimeoutError):
            socket.create_connection(ours.getsockname(), timeout=0.05)
        socket.create_connection(other.getsockname(), timeout=20).close()
