"""A worker's stream over TCP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

from .frame import Frame
from .send_queue import SendQueue
from .stream import Allocate, StreamBroken, StreamOptions
from .tcp_connection import TcpConnection
from .tcp_handshake import client_handshake

#: How long one attempt to connect may take, and then its handshake, before the next attempt.
_ATTEMPT_SECONDS = 5.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0


class TcpStream:
    """See ``WorkerStream``."""

    def __init__(self, peer: str, address: str, options: StreamOptions, job: str) -> None:
        self.peer = peer
        self.outbox = SendQueue(options.rate_limiter)
        self._address = address
        self._options = options
        self._job = job
        self._lock = threading.Lock()
        self._aborted = threading.Event()
        self._socket: socket.socket | None = None  # shut down by ``abort``; closed by the receiving thread only
        self._connection: TcpConnection | None = None

    def frames(self, place: Allocate) -> Iterator[Frame]:
        connected = self._connect()
        if connected is None:
            return
        name = f"{threading.current_thread().name}-sender"
        self._connection = TcpConnection(connected, self.peer, self.outbox, name, self._options.fail_after_seconds)
        yield from self._connection.frames(place)

    def abort(self) -> None:
        self.outbox.abort()
        with self._lock:
            self._aborted.set()
            if self._socket is not None:
                with suppress(OSError):  # it has ended by itself, or is not connected yet
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        with self._lock:
            closing, self._socket = self._socket, None
        if self._connection is not None:
            self._connection.close()
        elif closing is not None:
            closing.close()

    def _connect(self) -> socket.socket | None:
        """Return a connection to a server that knows the token, or None after ``abort``. Tries until then, without a limit."""
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not self._aborted.is_set():
            for family, kind, protocol, _, address in self._resolve():
                if (connected := self._attempt(family, kind, protocol, address)) is not None:
                    return connected
            self._aborted.wait(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        return None

    def _resolve(self) -> list[tuple[Any, ...]]:
        host, _, port = self._address.rpartition(":")
        try:
            return list(socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM))
        except OSError:
            return []  # the name may resolve later

    def _attempt(self, family: int, kind: int, protocol: int, address: Any) -> socket.socket | None:
        with ExitStack() as undo:
            try:
                connecting = socket.socket(family, kind, protocol)  # fails for example where there is no IPv6
                undo.callback(self._drop, connecting)
                with self._lock:
                    self._socket = connecting
                if self._aborted.is_set():
                    return None
                connecting.settimeout(_ATTEMPT_SECONDS)
                connecting.connect(address)
                client_handshake(connecting, self.peer, self._options.token, self._job, _ATTEMPT_SECONDS)
            except (OSError, StreamBroken):
                return None
            undo.pop_all()
            return connecting

    def _drop(self, connecting: socket.socket) -> None:
        with self._lock:
            self._socket = None
        connecting.close()
