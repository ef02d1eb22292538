"""Streams of frames between workers and shards, over gRPC or TCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from .frame import Frame
from .send_queue import SendQueue

#: Returns the memory for the payload of a push or result, given the message without its payload. It is called before a byte of
#: the payload is read, so that a message out of turn or out of range takes no memory and overwrites none. Raises ProtocolError.
Allocate = Callable[[Frame], memoryview]


class StreamBroken(Exception):
    """The connection broke or ended within a message; the text says why."""


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
            ProtocolError: a message is not of this protocol, or ``place`` refused it.
            Damaged: the payload of a message differs from the sent payload.
            CommschedError: no connection is possible; says why.
        """
        ...


class WorkerStream(Stream, Protocol):
    """The worker's end of a stream. ``frames`` connects first, and tries again while the server is not up."""

    def abort(self) -> None:
        """End at once: ``frames`` ends, and stops connecting. Idempotent. Thread-safe."""
        ...

    def close(self) -> None:
        """End, and return when all is released. Call it from the thread that iterates ``frames``, also after ``abort``."""
        ...


class Port(Protocol):
    """The server's end of all streams. It listens from construction on, and serves once ``serve`` was called."""

    #: ``host:port`` as bound.
    address: str

    def serve(self, handle: Callable[[Stream, str], None]) -> None:
        """Call ``handle`` with each stream and the name of its worker's job, in a thread of the stream's own. The stream ends
        when ``handle`` returns."""
        ...

    def close(self, graceful: bool) -> None:
        """Release the port, all connections and threads. If ``graceful``, streams may take a moment to end. Idempotent."""
        ...
