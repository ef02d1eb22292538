"""A server's port over TCP."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from ...core.errors import ConfigError
from ...rpc import DaemonExecutor
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

#: How often the log mentions strangers.
_WARN_EVERY_SECONDS = 10.0


class TcpPort:
    """See ``Port``. One thread accepts; each connection has one that receives and one that sends."""

    def __init__(self, address: str, token: str, pacer: Pacer | None, fail_after_seconds: float) -> None:
        if not token:
            raise ConfigError("the job's token is empty; set the same COMMSCHED_TOKEN on every rank")
        self._token = token
        self._pacer = pacer
        self._fail_after_seconds = fail_after_seconds
        self._listening = _listen(address)
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
        while (accepted := self._next()) is not None:
            if self._handshakes.acquire(blocking=False):
                self._executor.submit(self._meet, accepted, handle)
            else:
                accepted.close()  # one of ours tries again

    def _next(self) -> socket.socket | None:
        """The next connection, or None when closed."""
        while True:
            try:
                accepted, _ = self._listening.accept()
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
                    return accepted
            accepted.close()

    # --- the thread of one connection ---

    def _meet(self, accepted: socket.socket, handle: Callable[[Stream], None]) -> None:
        try:
            try:
                peer = _name(accepted)
                admit(accepted, self._token, _HANDSHAKE_SECONDS)
                with self._changed:
                    self._open[accepted] = True
            except Stranger as stranger:
                return self._warn(peer, stranger)
            except OSError:
                return None  # gone before it said anything
            finally:
                self._handshakes.release()
            self._serve(accepted, peer, handle)
        finally:
            with self._changed:
                del self._open[accepted]
                self._changed.notify_all()
            accepted.close()

    def _serve(self, accepted: socket.socket, peer: str, handle: Callable[[Stream], None]) -> None:
        outbox = Outbox(self._pacer)
        try:
            connection = TcpConnection(accepted, peer, outbox, "commsched-ps-sender", self._fail_after_seconds)
        except OSError:
            return  # it ended meanwhile
        try:
            handle(connection)
            connection.linger(_GRACE_SECONDS)
        finally:
            connection.close()

    def _warn(self, peer: str, stranger: Stranger) -> None:
        now = monotonic()
        if now >= self._warn_again_at and not self._closed:  # a stranger must not fill the log
            self._warn_again_at = now + _WARN_EVERY_SECONDS
            log.warning("%s refused a connection from %s: %s", self.address, peer, stranger)


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot listen at {address}: {error}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not SO_REUSEPORT: two servers would share clients
        listening.bind(where)
        listening.listen(_MOST_HANDSHAKES)
    except OSError as error:
        listening.close()
        taken = "the port is taken by another process; choose another, or 0 for any free one"
        why = taken if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise ConfigError(f"cannot listen at {address}: {why}") from error
    return listening


def _name(accepted: socket.socket) -> str:
    host, port, *_ = accepted.getpeername()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
