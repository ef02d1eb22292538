"""TCP as a carrier of frames: a worker's stream, and a shard's port."""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from time import monotonic
from typing import Any

from ....core.errors import ConfigError, TransportError, to_record
from ....net.handshake import HandshakeRejected
from ....net.rpc import DaemonExecutor, listen, most_strangers
from ....net.tls import NotOfThisJob, TlsSocket
from ....settings import each_of, together
from .frame import Frame, FrameKind, encode, json_frame
from .send_queue import SendQueue
from .stream import Allocate, ServedStream, StreamBroken, StreamOptions
from .tcp_connection import LANE, TcpConnection
from .tls_connection import TlsConnection

#: How long one attempt to connect may take, and then its handshake, before the next attempt.
_ATTEMPT_SECONDS = 5.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0


class TcpStream:
    """See ``WorkerStream``. It shares its gradients with the stream ``beside``."""

    def __init__(
        self, peer: str, address: str, options: StreamOptions, job: str, waits: bool = True, beside: TcpStream | None = None
    ) -> None:
        self.peer = peer
        self.outbox: SendQueue = SendQueue(options.rate_limiter, beside.outbox if beside is not None else None)
        self._address = address
        self._options = options
        self._job = job
        self._waits = waits
        self._lock = threading.Lock()
        self._aborted = threading.Event()
        self._socket: socket.socket | None = None  # shut down by ``abort``; closed by the receiving thread only
        self._connection: TcpConnection | None = None

    def frames(self, place: Allocate) -> Iterator[Frame]:
        connected = self._connect()
        if connected is None:
            return
        name = f"{threading.current_thread().name}-sender"
        self._connection = _connection(connected, self.peer, self.outbox, name, self._options.fail_after_seconds)
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

    def _connect(self) -> socket.socket | TlsSocket | None:
        """Return a connection to a server that knows the token, or None after ``abort``. Tries until then, without a limit.

        Raises:
            StreamBroken: there is none, and this stream does not wait for it.
        """
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not self._aborted.is_set():
            for family, kind, protocol, _, address in self._resolve():
                with self._options.connecting:
                    connected = self._attempt(family, kind, protocol, address)
                if connected is not None:
                    return connected
            if not self._waits:
                raise StreamBroken("nobody answers there")
            self._aborted.wait(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        return None

    def _resolve(self) -> list[tuple[Any, ...]]:
        host, _, port = self._address.rpartition(":")
        try:
            return list(socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM))
        except OSError:
            return []  # the name may resolve later

    def _attempt(self, family: int, kind: int, protocol: int, address: Any) -> socket.socket | TlsSocket | None:
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
                made = LANE.begin(
                    connecting, self.peer, self._options.token, self._job, self._options.identity, _ATTEMPT_SECONDS
                )
            except (OSError, StreamBroken):
                return None
            undo.pop_all()
            return made

    def _drop(self, connecting: socket.socket) -> None:
        with self._lock:
            self._socket = None
        connecting.close()


def _connection(
    made: socket.socket | TlsSocket, peer: str, outbox: SendQueue, name: str, fail_after_seconds: float
) -> TcpConnection:
    if isinstance(made, TlsSocket):
        return TlsConnection(made, peer, outbox, name, fail_after_seconds)
    return TcpConnection(made, peer, outbox, name, fail_after_seconds)


log = logging.getLogger("commsched")

#: How long a handshake may take, and how many of one host and of all hosts may be outstanding. This bounds what strangers can
#: cost at a time. Workers of many hosts may connect at once.
_HANDSHAKE_SECONDS = 5.0
_MAX_HANDSHAKES = 64
_MAX_OF_ALL_HOSTS = 1024

#: How long streams may take to end in good order when the port closes, and how long a stream lingers after its last message.
_GRACE_SECONDS = 1.0

#: Room for a hello.
_HELLO_BYTES = 64 * 1024

#: How often the log mentions connections that were refused.
_WARN_EVERY_SECONDS = 10.0


class TcpPort:
    """See ``Port``. One thread accepts at each address. Each connection has one thread that receives and one that sends."""

    def __init__(self, address: str, options: StreamOptions) -> None:
        if not options.token:
            raise ConfigError("the job's token is empty; set the same COMMSCHED_TOKEN on every rank")
        self._options = options
        self._listening: list[socket.socket] = []
        try:
            for each in each_of(address):
                self._listening.append(listen(each))
        except BaseException:
            for listening in self._listening:
                listening.close()
            raise
        self.address = together(
            f"{each.rpartition(':')[0]}:{listening.getsockname()[1]}"
            for each, listening in zip(each_of(address), self._listening, strict=True)
        )
        self._executor = DaemonExecutor("commsched-ps")
        self._changed = threading.Condition()
        # Connections, the oldest first. The value is the host while the handshake is outstanding, else None. ``close`` and
        # ``_make_room`` shut connections down; their own threads close them.
        self._open: dict[socket.socket, str | None] = {}
        self._closed = False
        self._warn_again_at = 0.0

    def serve(self, handle: Callable[[ServedStream, str], None]) -> None:
        for listening in self._listening:
            self._executor.submit(self._accept, listening, handle)

    def close(self, graceful: bool) -> None:
        with self._changed:
            self._closed = True
            for listening in self._listening:
                with suppress(OSError):  # it was closed before
                    listening.shutdown(socket.SHUT_RDWR)
            if graceful:
                self._changed.wait_for(lambda: all(self._open.values()), _GRACE_SECONDS)
            for each in self._open:
                with suppress(OSError):  # it has ended by itself
                    each.shutdown(socket.SHUT_RDWR)
        self._executor.shutdown()
        for listening in self._listening:
            listening.close()

    # --- the accepting threads ---

    def _accept(self, listening: socket.socket, handle: Callable[[ServedStream, str], None]) -> None:
        while (connection := self._next(listening)) is not None:
            accepted, peer = connection
            self._make_room()
            try:
                self._executor.submit(self._meet, accepted, peer, handle)
            except RuntimeError as error:  # the system has no thread left, or the port was closed meanwhile
                self._warn(peer, error)
                self._end(accepted)

    def _next(self, listening: socket.socket) -> tuple[socket.socket, str] | None:
        """Return the next connection and its name in messages, or None when the port is closed."""
        while True:
            try:
                accepted, (host, port, *_) = listening.accept()
            except OSError as error:
                with self._changed:
                    if self._closed:
                        return None
                    log.warning("%s cannot accept connections: %s", self.address, error)
                    self._changed.wait(1.0)  # for example out of file descriptors, which may come free
                continue
            with self._changed:
                if not self._closed:
                    self._open[accepted] = host
                    return accepted, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            accepted.close()

    def _make_room(self) -> None:
        """If too many handshakes are outstanding, end the oldest one of the host that has most of them.

        A worker's handshake takes milliseconds, so a handshake that waits is likely a stranger's. A worker that was ended tries
        again.
        """
        with self._changed:
            hosts = Counter(host for host in self._open.values() if host is not None)
            most = max(hosts, key=hosts.__getitem__, default="")
            if hosts[most] > _MAX_HANDSHAKES:
                too_many = f"{_MAX_HANDSHAKES} handshakes"
            elif hosts.total() > (limit := min(_MAX_OF_ALL_HOSTS, most_strangers())):
                too_many = f"{limit} handshakes of all hosts"
            else:
                return
            oldest = next(accepted for accepted, host in self._open.items() if host == most)
            self._open[oldest] = None  # it is not counted any more
        self._warn(most, f"more than {too_many} were under way")  # before its own thread warns
        with suppress(OSError):  # it has ended by itself
            oldest.shutdown(socket.SHUT_RDWR)

    # --- the thread of one connection ---

    def _meet(self, accepted: socket.socket, peer: str, handle: Callable[[ServedStream, str], None]) -> None:
        try:
            made, job = LANE.answer(
                accepted, self._options.token, self._options.identity, _HANDSHAKE_SECONDS, lambda: self._proven(accepted)
            )
            self._serve(made, peer, job, handle)
        except HandshakeRejected as stranger:
            self._warn(peer, stranger)
        finally:
            self._end(accepted)

    def _proven(self, accepted: socket.socket) -> None:
        """Protect the connection from ``_make_room``: a worker that was admitted does not try again."""
        with self._changed:
            if self._open[accepted] is None:
                raise HandshakeRejected("it was closed to make room for others")
            self._open[accepted] = None

    def _serve(
        self, accepted: socket.socket | TlsSocket, peer: str, job: str, handle: Callable[[ServedStream, str], None]
    ) -> None:
        outbox = SendQueue(self._options.rate_limiter)
        try:
            connection = _connection(accepted, peer, outbox, "commsched-ps-sender", self._options.fail_after_seconds)
        except (OSError, RuntimeError) as error:  # the system lacks a resource, for example a thread
            return self._refuse(accepted, TransportError(f"{self.address} cannot serve {peer}: {error}"))
        try:
            handle(connection, job)
            connection.linger(_GRACE_SECONDS)
        finally:
            connection.close()

    def _refuse(self, accepted: socket.socket | TlsSocket, error: TransportError) -> None:
        """Tell the worker, which was admitted and does not try again, without a thread that sends."""
        log.warning("%s", error)
        with suppress(OSError, NotOfThisJob):  # it has ended by itself
            accepted.settimeout(_GRACE_SECONDS)
            accepted.sendall(encode(json_frame(FrameKind.ERROR, to_record(error))))
            accepted.recv(_HELLO_BYTES)  # if it were unread, the end of the connection could overtake the error

    # --- both threads ---

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
