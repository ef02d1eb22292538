"""Stream: one connection between a worker and a server, whatever carries it, seen from either end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from .frame import Frame
from .outbox import Outbox

#: Where the payload of a push or result is to lie, given all of it but the payload; asked before a byte of that is read, so
#: that what is out of turn or out of range takes no memory and reaches none. Raises ProtocolError.
Place = Callable[[Frame], memoryview]


class StreamBroken(Exception):
    """The connection ended other than between two messages; the text says why."""


class Stream(Protocol):
    """What is put into ``outbox`` is sent, by a thread of the carrier, which also calls each message's ``sent``."""

    #: What messages call the other end.
    peer: str
    outbox: Outbox

    def frames(self, place: Place) -> Iterator[Frame]:
        """What comes, until the other end sends no more. A carrier that has the payload in memory anyway asks for no place.

        Raises:
            StreamBroken: the connection broke.
            ProtocolError: what came is not ours, or ``place`` refused it.
            CommschedError: there is no connection to be had; says why.
        """
        ...


class WorkerStream(Stream, Protocol):
    """The worker's end. ``frames`` connects first, and tries again while the server is not up."""

    def abort(self) -> None:
        """End at once: ``frames`` ends, and stops connecting. Idempotent; any thread."""
        ...

    def close(self) -> None:
        """End, and return when nothing is left. For the thread that iterates ``frames``, and needed after an ``abort`` too."""
        ...


class Port(Protocol):
    """The server's end of all streams: listens from construction on, and serves once ``serve`` was called."""

    #: ``host:port`` as bound.
    address: str

    def serve(self, handle: Callable[[Stream], None]) -> None:
        """Call ``handle`` with each stream, in a thread of its own, which ends when ``handle`` returns."""
        ...

    def close(self, graceful: bool) -> None:
        """Give back the port, all connections and threads; ``graceful``: streams may take a moment to end. Idempotent."""
        ...
