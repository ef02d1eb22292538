"""A man in the middle: a real relay between two ends of a TCP connection, which hears everything and may change it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


def nothing(to: str, data: bytes) -> bytes:
    """Changes nothing."""
    return data


class Relay:
    """Passes on what comes, both ways, to and from ``server``: what ``change(to, data)`` returns in the place of ``data`` on
    the way ``to`` the ``"server"`` or the ``"worker"``. ``heard`` has everything that came, by the same names."""

    def __init__(self, server: str, change: Callable[[str, bytes], bytes] = nothing) -> None:
        host, _, port = server.rpartition(":")
        self._server = host, int(port)
        self._change = change
        self.heard = {"server": bytearray(), "worker": bytearray()}
        self._ends: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                worker, _ = self._listening.accept()
                server = socket.create_connection(self._server)
                self._ends += [worker, server]
                for way in ((worker, server, "server"), (server, worker, "worker")):
                    self._threads.append(threading.Thread(target=self._pass_on, args=way, daemon=True))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, to: str) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.heard[to] += data
                target.sendall(self._change(to, data))
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in (self._listening, *self._ends):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(60)
