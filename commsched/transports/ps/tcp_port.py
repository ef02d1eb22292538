"""A server's port over TCP."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from ...core.errors import ConfigError
from ...rpc import DaemonExecutor, listen
from .outbox import Outbox
from .pacer import Pacer
from .stream import Stream
from .tcp_connection import TcpConnection
from .tcp_handshake import Stranger, admit

log = logging.getLogger("commsched")

#: How long a handshake may take, and how many may be under way: what strangers can cost at a time.
_HANDSHAKE_SECONDS = 5.0
_MOST_HANDSHAKES = 64

#: How long streams may take to end in good order when the port closes, and each by itself once its last word is said.
_GRACE_SECONDS = 1.0

#: How often the log mentions connections that were refused.
_WARN_EVERY_SECONDS = 10.0


class TcpPort:
    """See ``Port``. One thread accepts; each connection has one that receives and one that sends."""

    def __init__(self, address: str, token: str, pacer: Pacer | None, fail_after_seconds: float) -> None:
        if not token:
            raise ConfigError("the job's token is empty; set the same COMMSCHED_TOKEN on every rank")
        self._token = token
        self._pacer = pacer
        self._fail_after_seconds = fail_after_seconds
        self._listening = listen(address)
        self.address = f"{address.rpartition(':')[0]}:{self._listening.getsockname()[1]}"
        self._executor = DaemonExecutor("commsched-ps")
        self._handshakes = threading.BoundedSemaphore(_MOST_HANDSHAKES)
        self._changed = threading.Condition()
        self._open: dict[socket.socket, bool] = {}  # whether its handshake is over; shut down by close, closed by its thread
        self._closed = False
        self._warn_again_at = 0.0

    def serve(self, handle: Callable[[Stream], None]) -> None:
        self._executor.submit(self._accept, handle)

    def close(self, graceful: bool) -> None:
        with self._changed:
            self._closed = True
            with suppress(OSError):  # closed before
                self._listening.shutdown(socket.SHUT_RDWR)
            if graceful:
                self._changed.wait_for(lambda: not any(self._open.values()), _GRACE_SECONDS)
            for each in self._open:
                with suppress(OSError):  # it has ended by itself
                    each.shutdown(socket.SHUT_RDWR)
        self._executor.shutdown()
        self._listening.close()

    # --- the accepting thread ---

    def _accept(self, handle: Callable[[Stream], None]) -> None:
        while (connection := self._next()) is not None:
            accepted, peer = connection
            # Who is refused here and is one of ours tries again.
            if not self._handshakes.acquire(blocking=False):
                self._warn(peer, f"{_MOST_HANDSHAKES} handshakes are under way")
                self._end(accepted)
                continue
            try:
                self._executor.submit(self._meet, accepted, peer, handle)
            except RuntimeError as error:  # there is no thread to be had, or the port was closed meanwhile
                self._handshakes.release()
                self._warn(peer, error)
                self._end(accepted)

    def _next(self) -> tuple[socket.socket, str] | None:
        """The next connection and what messages call it, or None when closed."""
        while True:
            try:
                accepted, (host, port, *_) = self._listening.accept()
            except OSError as error:
                with self._changed:
                    if self._closed:
                        return None
                    log.warning("%s cannot accept connections: %s", self.address, error)
                    self._changed.wait(1.0)  # out of file descriptors, say: some may come free
                continue
            with self._changed:
                if not self._closed:
                    self._open[accepted] = False
                    return accepted, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            accepted.close()

    # --- the thread of one connection ---

    def _meet(self, accepted: socket.socket, peer: str, handle: Callable[[Stream], None]) -> None:
        try:
            try:
                admit(accepted, self._token, _HANDSHAKE_SECONDS)
            finally:
                self._handshakes.release()
            with self._changed:
                self._open[accepted] = True
            self._serve(accepted, peer, handle)
        except Stranger as stranger:
            self._warn(peer, stranger)
        finally:
            self._end(accepted)

    def _serve(self, accepted: socket.socket, peer: str, handle: Callable[[Stream], None]) -> None:
        outbox = Outbox(self._pacer)
        try:
            connection = TcpConnection(accepted, peer, outbox, "commsched-ps-sender", self._fail_after_seconds)
        except (OSError, RuntimeError) as error:  # the system has not what it takes, a thread say
            return log.warning("%s cannot serve %s: %s", self.address, peer, error)
        try:
            handle(connection)
            connection.linger(_GRACE_SECONDS)
        finally:
            connection.close()

    # --- both ---

    def _warn(self, peer: str, why: object) -> None:
        now = monotonic()
        if now >= self._warn_again_at and not self._closed:  # a stranger must not fill the log
            self._warn_again_at = now + _WARN_EVERY_SECONDS
            log.warning("%s refused a connection from %s: %s", self.address, peer, why)

    def _end(self, accepted: socket.socket) -> None:
        with self._changed:
            del self._open[accepted]
            self._changed.notify_all()
        accepted.close()
