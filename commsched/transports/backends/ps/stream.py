"""Streams of frames between workers and shards, and the carriers by which they go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ....core.errors import ConfigError
from ....net.handshake import StreamBroken as StreamBroken
from ....net.tls import Identity, identity_of
from ....settings import Settings, each_of
from .frame import Frame
from .send_queue import RateLimiter, SendQueue

#: The most streams of a process that connect at a time. With a shard on each of many ranks on few cores, all handshakes would
#: otherwise take as long as the last of them, which is longer than a handshake may take; then all would begin again.
_MAX_CONNECTING = 8


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options of all streams of a process. All processes of a job have the same, except for the rate.

    Attributes:
        token: the job's secret, which every connecting process must prove.
        lane: the carrier of messages, ``tcp`` or ``grpc``.
        fail_after_seconds: bounds how long a frozen connection lives.
        rate_limiter: caps the rate of sending of all streams of the process, if given. Closed with the options.
        identity: this process's; with one, all streams are encrypted.
        connecting: held by each stream of the process that connects, so that few do so at a time.
    """

    token: str = field(repr=False)
    lane: str = "tcp"
    fail_after_seconds: float = 10.0
    rate_limiter: RateLimiter | None = None
    identity: Identity | None = field(default=None, compare=False)
    connecting: threading.Semaphore = field(
        default_factory=lambda: threading.Semaphore(_MAX_CONNECTING), compare=False, repr=False
    )

    @classmethod
    def of(cls, settings: Settings, token: str) -> StreamOptions:
        """The options that ``settings`` ask for.

        Raises:
            ConfigError: the certificates for ``security=tls`` cannot be read or made.
        """
        identity = identity_of(settings.security, token, settings.certificates)
        limiter = RateLimiter(settings.rate) if settings.rate is not None else None
        return cls(token, settings.lane, settings.fail_after, limiter, identity)

    def close(self) -> None:
        """End the rate limiter. Idempotent."""
        if self.rate_limiter is not None:
            self.rate_limiter.close()


#: Returns the memory for the payload of a push or result, given the message without its payload. It is called before a byte of
#: the payload is read, so that a message out of turn or out of range takes no memory and overwrites none. Raises ProtocolError.
Allocate = Callable[[Frame], memoryview]


class Altered(StreamBroken):
    """Bytes of an encrypted connection are not those that were sent. ``heard``: the other end found that, and has said so."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.heard = "ALERT" in reason

    def describe(self, this_end: str, other_end: str) -> str:
        """The error's text, for both ends' names in messages."""
        receiver, sender = (other_end, this_end) if self.heard else (this_end, other_end)
        return (
            f"{receiver} got from {sender} what that did not send: somebody on the way changes, replays or invents bytes, or a "
            f"network card, switch or memory does (TLS: {self})"
        )


class Stream(Protocol):
    """A stream of frames. A thread of the carrier sends the messages in ``outbox``, and calls each message's ``sent``."""

    #: The name of the other end in messages.
    peer: str
    outbox: SendQueue

    def frames(self, place: Allocate) -> Iterator[Frame]:
        """Iterate the received messages, until the other end sends no more.

        A carrier that has the payload in memory anyway does not call ``place``.

        Raises:
            StreamBroken: the connection broke.
            Altered: somebody on the way changed, replayed or invented bytes of an encrypted connection.
            ProtocolError: a message is not of this protocol, or ``place`` refused it.
            Damaged: the payload of a message differs from the sent payload.
            CommschedError: no connection is possible; says why.
        """


class ServedStream(Stream, Protocol):
    """The server's end of a stream."""

    @property
    def has_ended(self) -> bool:
        """Whether the worker has ended its connection. Messages that came before may not have been read yet."""


class WorkerStream(Stream, Protocol):
    """The worker's end of a stream. ``frames`` connects first."""

    def abort(self) -> None:
        """End at once: ``frames`` ends, and stops connecting. Idempotent. Thread-safe."""

    def close(self) -> None:
        """End, and return when all is released. Call it from the thread that iterates ``frames``, also after ``abort``."""


class Port(Protocol):
    """The server's end of all streams. It listens from construction on, and serves once ``serve`` was called."""

    #: ``host:port`` as bound.
    address: str

    def serve(self, handle: Callable[[ServedStream, str], None]) -> None:
        """Call ``handle`` with each stream and the name of its worker's job, in a thread of the stream's own. The stream ends
        when ``handle`` returns."""

    def close(self, graceful: bool) -> None:
        """Release the port, all connections and threads. If ``graceful``, streams may take a moment to end. Idempotent."""


def open_streams(
    peer: str, address: str, options: StreamOptions, job: str, flows: int = 1, *, waits: bool = True
) -> list[WorkerStream]:
    """Return a worker's ends of ``flows`` streams to the server at ``address``; gRPC has one. They share the gradients that
    wait to be sent. Each connects when its ``frames`` are iterated. A server with several addresses gets the streams at each in
    turn.

    Args:
        peer: the name of the server in messages, such as ``server 1 at 10.0.0.7:4242``.
        job: the job's name, which the worker proves with the token.
        waits: they try again while the server is not up. Otherwise ``frames`` raises StreamBroken.

    Raises:
        ConfigError: the server has several addresses and the carrier uses one, or it has more addresses than ``flows``.
    """
    if options.lane == "grpc":
        from .grpc_lane import GrpcStream

        _require_one(address)
        return [GrpcStream(peer, address, options, job, waits)]
    from .tcp_lane import TcpStream

    addresses = each_of(address)
    if flows < len(addresses):
        raise ConfigError(
            f"{peer} has {len(addresses)} addresses, and flows={flows} would leave some without a connection: set "
            f"COMMSCHED_FLOWS={len(addresses)} on every rank, or a multiple of it"
        )
    first = TcpStream(peer, addresses[0], options, job, waits)
    others = (addresses[flow % len(addresses)] for flow in range(1, flows))
    return [first, *(TcpStream(peer, each, options, job, waits, beside=first) for each in others)]


def open_port(address: str, options: StreamOptions, most_connections: int = 0) -> Port:
    """Return a server's port at ``address``: ``host:port``, or several of them. Port 0 means any free port.

    Args:
        most_connections: how many connections are accepted, at least. TCP has no limit; that of gRPC is a quarter of the file
            descriptors if that is more.

    Raises:
        ConfigError: the server cannot listen at the address, or the token is empty.
    """
    if options.lane == "grpc":
        from .grpc_lane import GrpcPort

        _require_one(address)
        return GrpcPort(address, options, most_connections)
    from .tcp_lane import TcpPort

    return TcpPort(address, options)


def _require_one(address: str) -> None:
    if len(each_of(address)) > 1:
        raise ConfigError(
            f"{address} is several addresses, which need lane='tcp': gRPC has one connection between two processes"
        )
