"""The ranks that share a host and the rank that leads each host, and the rendezvous of the ranks of one host: a Unix
socket for this user only, whose name only the job knows."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from time import monotonic

from ...core.errors import CommschedError, ConfigError, PeerTimeout, ProtocolError, TransportError, ranks_text
from ..backend import WhenFailed
from .messages import Kind, LocalMessage, UnixConnection, close_all


@dataclass(frozen=True, slots=True)
class RankLocation:
    """A rank's own record: the address that the other ranks reach it at, its place among the ranks of its machine, whether
    its system has the shared memory that a hierarchy needs, and whether its user has set how to use the network."""

    address: str
    local_rank: int
    shares_memory: bool
    sets_network: bool = False


#: The settings that, beside ``transport``, say how ranks use the network. None of them has an effect in a hierarchy on a single
#: host, which uses no network.
NETWORK_SETTINGS = ("lane", "flows", "order", "rate", "wire")


@dataclass(frozen=True, slots=True)
class HostTopology:
    """``hosts[h]`` holds the ranks of a host, ordered by local rank. The first one leads. Hosts are ordered by lowest rank.

    Rank 0 comes first whatever its local rank is: over an ordered network rank 0's credit counts, so rank 0 must be a leader.
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, seats: Sequence[RankLocation]) -> HostTopology:
        """Group the ranks into hosts. ``seats[r]`` is the record of rank ``r``. Ranks with the same address share a host."""
        by_address: dict[str, list[int]] = {}
        for rank, seat in enumerate(seats):
            by_address.setdefault(seat.address, []).append(rank)

        def place(rank: int) -> tuple[bool, int]:
            return rank != 0, seats[rank].local_rank

        return cls(tuple(tuple(sorted(ranks, key=place)) for ranks in by_address.values()))

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.hosts)

    @property
    def leader_of(self) -> tuple[int, ...]:
        """By rank: the leader of its host."""
        leaders = {rank: ranks[0] for ranks in self.hosts for rank in ranks}
        return tuple(leaders[rank] for rank in sorted(leaders))

    def host_of(self, rank: int) -> int:
        return next(host for host, ranks in enumerate(self.hosts) if rank in ranks)

    @property
    def gains(self) -> bool:
        """Whether a hierarchy sends less over the network."""
        return len(self.hosts) > 1 and any(len(ranks) > 1 for ranks in self.hosts)


def obstacle(layout: HostTopology, seats: Sequence[RankLocation]) -> str | None:
    """The reason why the ranks of a host cannot share memory, or None if they can."""
    for rank, seat in enumerate(seats):
        if not seat.shares_memory:
            return f"rank {rank} runs on a system without memfd_create"
    for ranks in layout.hosts:
        for one, other in pairwise(sorted(ranks, key=lambda rank: (seats[rank].local_rank, rank))):
            if seats[one].local_rank == seats[other].local_rank:
                seat = seats[one]
                return f"ranks {one} and {other} of {seat.address} both say that their local rank is {seat.local_rank}"
    return None


#: The most ranks of a single host that connect to each other by default. Over ``ps`` n ranks have 4 n^2 threads for that, and
#: Linux lets a small machine have 32,768 in all (``kernel.pid_max``).
MAX_MESH = 48


def is_wanted(
    hierarchy: str, collective: str, layout: HostTopology, seats: Sequence[RankLocation], meshed: bool = True
) -> bool:
    """Whether the setting ``hierarchy`` (``auto``, ``on`` or ``off``) gives a hierarchy here, with that ``collective``.
    ``meshed``: without a hierarchy every rank connects to every other one.

    On a single host ``auto`` gives none if a rank has set how to use the network: it would not be used.

    Raises:
        ConfigError: ``hierarchy`` is ``on`` and not possible; says why.
    """
    hindered_by = obstacle(layout, seats)
    if hierarchy == "on" and hindered_by is not None:
        raise ConfigError(f"hierarchy='on' is not possible: {hindered_by}")
    if hierarchy == "auto":  # a hierarchy has no reduce-scatter and all-gather tasks over all ranks
        spares = meshed and len(layout.hosts) == 1 and len(seats) > MAX_MESH
        gains = layout.gains or (spares and not any(seat.sets_network for seat in seats))
        return gains and hindered_by is None and collective != "rsag"
    return hierarchy == "on"


log = logging.getLogger("commsched")

#: How long a connecting process may take to send its hello.
_HELLO_SECONDS = 5.0

_CREDENTIALS = Struct("3i")  # process, user and group


class HostRendezvous:
    """The socket at which a leader waits for the members of its host. It has an abstract name and no file, and so ends with the
    process.

    The kernel reports the user at the other end. Another user is refused.
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
            raise ConfigError(
                f"the ranks of this host cannot connect to each other: {error.strerror or error}; set hierarchy=off"
            ) from error

    def wait(self, within_seconds: float, when_failed: WhenFailed) -> dict[int, UnixConnection]:
        """Wait for all members, and return a link to each, by rank.

        Raises:
            PeerTimeout: not all members connected within that time; names the missing ranks.
            TransportError: the system does not accept their connections.
            CommschedError: the job failed meanwhile.
        """
        when_failed(self._give_up)
        deadline = monotonic() + within_seconds
        links: dict[int, UnixConnection] = {}
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
        said = ranks_text(missing)
        try:
            connection, _ = self._listening.accept()
        except TimeoutError as error:
            raise PeerTimeout(f"{said} of this host did not connect within {within_seconds:.0f} s") from error
        except OSError as error:
            raise TransportError(f"{said} of this host cannot connect: {error.strerror or error}") from error
        if self._failure is not None:
            connection.close()
            raise self._failure
        return connection

    def _welcome(self, connection: socket.socket, links: dict[int, UnixConnection]) -> None:
        link = UnixConnection(connection)
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
        except (ConfigError, ProtocolError, TransportError, TimeoutError) as error:
            log.warning("refused a connection of this host: %s", error)
            return link.close()
        link.limit(None)
        links[message.rank] = link

    def _give_up(self, error: CommschedError) -> None:
        self._failure = error
        # A shutdown of the socket does not end an accept on every system, but a connection does.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waking:
            waking.setblocking(False)
            waking.connect(_abstract(self.name))

    def close(self) -> None:
        self._listening.close()


def connect_to_leader(name: str, rank: int, leader: int) -> UnixConnection:
    """Return a link from ``rank`` to its leader, which has a :class:`HostRendezvous` of that name.

    Raises:
        ConfigError: the leader cannot be reached, for example in another container, or belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(_abstract(name))
        _require_same_user(connection)
        link = UnixConnection(connection)
        link.send(LocalMessage(Kind.HELLO, rank=rank))
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
        raise ConfigError(
            f"the ranks of a host must belong to one user; one belongs to user {user}, another to user {os.geteuid()}"
        )
