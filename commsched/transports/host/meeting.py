"""How the ranks of a host find each other: a socket of this system whose name only the job knows, for this user only."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from struct import Struct
from time import monotonic

from ...core.errors import CommschedError, ConfigError, PeerTimeout, ProtocolError, TransportError
from .member import WhenFailed
from .message import Kind, Link, Message, close_all

log = logging.getLogger("commsched")

#: How long who connects may take to say who it is.
_HELLO_SECONDS = 5.0

_CREDENTIALS = Struct("3i")  # process, user and group


class Meeting:
    """Where a leader waits for the members of its host. It is a name and not a file: it ends with the process.

    The kernel says who is at the other end; another user is refused.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self.name = f"commsched-{secrets.token_hex(16)}"
        self._members = members
        self._failure: CommschedError | None = None
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listening.bind(_abstract(self.name))
            self._listening.listen(len(members) + 8)
        except OSError as error:
            self._listening.close()
            raise ConfigError(f"the ranks of this host cannot meet: {error.strerror or error}; set hierarchy=off") from error

    def wait(self, within_seconds: float, when_failed: WhenFailed) -> dict[int, Link]:
        """A link to every member, once all have come.

        Raises:
            PeerTimeout: not all came within that time; names those missing.
            TransportError: this system does not let them connect.
            CommschedError: the job failed meanwhile.
        """
        when_failed(self._give_up)
        deadline = monotonic() + within_seconds
        links: dict[int, Link] = {}
        try:
            while missing := [rank for rank in self._members if rank not in links]:
                self._listening.settimeout(max(0.0, deadline - monotonic()) or 1e-9)
                connection = self._accept(within_seconds, missing)
                self._welcome(connection, links)
            return links
        except BaseException:
            for link in links.values():
                link.close()
            raise

    def _accept(self, within_seconds: float, missing: list[int]) -> socket.socket:
        said = ", ".join(map(str, missing))
        try:
            connection, _ = self._listening.accept()
        except TimeoutError as error:
            raise PeerTimeout(f"rank {said} of this host did not connect within {within_seconds:.0f} s") from error
        except OSError as error:
            raise TransportError(f"rank {said} of this host cannot connect: {error.strerror or error}") from error
        if self._failure is not None:
            connection.close()
            raise self._failure
        return connection

    def _welcome(self, connection: socket.socket, links: dict[int, Link]) -> None:
        link = Link(connection)
        try:
            _require_same_user(connection)
            link.limit(_HELLO_SECONDS)
            received = link.receive()
            if received is None:
                raise ProtocolError("it ended at once")
            message, fds = received
            close_all(fds)
            if message.kind is not Kind.HELLO or message.rank not in self._members or message.rank in links:
                raise ProtocolError(f"it sent {message.kind.name} as rank {message.rank}")
        except (ConfigError, ProtocolError, TimeoutError) as error:
            log.warning("refused a connection of this host: %s", error)
            return link.close()
        link.limit(None)
        links[message.rank] = link

    def _give_up(self, error: CommschedError) -> None:
        self._failure = error
        # Not every system ends an accept on a socket that is shut down.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waking:
            waking.setblocking(False)
            waking.connect(_abstract(self.name))

    def close(self) -> None:
        self._listening.close()


def connect(name: str, rank: int, leader: int) -> Link:
    """A link from ``rank`` to its leader, who has a :class:`Meeting` of that name.

    Raises:
        ConfigError: the leader is not reached, as in another container, or is another user's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(_abstract(name))
        _require_same_user(connection)
        link = Link(connection)
        link.send(Message(Kind.HELLO, rank=rank))
        return link
    except ConfigError:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        raise ConfigError(
            f"rank {rank} has the address of rank {leader} but does not reach it within the host ({error.strerror or error}); "
            "if they are in different containers, set hierarchy=off"
        ) from error


def _abstract(name: str) -> str:
    return f"\0{name}"


def _require_same_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user = _CREDENTIALS.unpack(credentials)[1]
    if user != os.geteuid():
        raise ConfigError(f"the ranks of a host are to be of one user; one is of user {user}, another of user {os.geteuid()}")
