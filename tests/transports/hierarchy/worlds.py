"""Worlds of ranks that are threads and believe to be on several hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from commsched.core.errors import CommschedError
from commsched.core.interfaces import OnFailure, Transport
from commsched.core.world import World
from commsched.testing.checked_world import Meeting, OpenWorld
from commsched.testing.world import run_world
from commsched.transports.backend import TransportContext
from commsched.transports.backends.local import LocalWorld
from commsched.transports.hierarchy import open_hierarchy

from ..ordered import OrderedWorld
from ..worlds import close_together

#: Which host a rank is on.
HostOf = Callable[[int], int]

#: For each world anew: opens what goes between hosts.
OpenNetwork = Callable[[], Callable[[TransportContext], Transport]]


def contexts(host_of: HostOf, listeners: Sequence[OnFailure], **settings: object) -> list[TransportContext]:
    """What each rank is given; a failure that one tells is told to all, as by the control channel."""
    size = len(listeners)
    meeting = Meeting(size)
    hosts = [host_of(rank) for rank in range(size)]

    def tell(error: CommschedError) -> None:
        for on_failure in listeners:
            on_failure(error)

    def context(rank: int) -> TransportContext:
        local_rank = hosts[:rank].count(hosts[rank])
        world = World(rank, size, local_rank, hosts.count(hosts[rank]), "threads")
        bare = meeting.context(rank, tell, **{"hierarchy": "on", **settings})
        return replace(bare, world=world, host=f"127.0.0.{hosts[rank] + 1}")

    return [context(rank) for rank in range(size)]


class LocalNetwork:
    """Hosts that meet in memory, too. Made for one opening."""

    def __init__(self) -> None:
        self._world: LocalWorld | OrderedWorld | None = None

    def make_world(self, context: TransportContext) -> LocalWorld | OrderedWorld:
        return LocalWorld(context.world.world_size, context.contributors)

    def __call__(self, context: TransportContext) -> Transport:
        context.gather(None)
        if context.world.rank == 0:
            self._world = self.make_world(context)
        context.gather(None)
        assert self._world is not None
        return self._world.transport(context.world.rank, context.on_failure)


class OrderedNetwork(LocalNetwork):
    """The same for collectives without identity, which give wrong numbers if hosts start them in different orders."""

    def make_world(self, context: TransportContext) -> OrderedWorld:
        return OrderedWorld(context.world.world_size, context.contributors.divisor)


def open_all(
    host_of: HostOf,
    open_network: OpenNetwork,
    listeners: Sequence[OnFailure],
    **settings: object,
) -> list[Transport]:
    everybodys = contexts(host_of, listeners, **settings)
    network = open_network()
    return run_world(len(listeners), lambda rank: open_hierarchy(everybodys[rank], network))


def opening(
    host_of: HostOf,
    size: int,
    network: Callable[[TransportContext], Transport],
    wrap_network: Callable[[Transport], Transport] = lambda network: network,
) -> Callable[[int, object], Transport]:
    """For ``local_sessions``, once: opens the transport of each of ``size`` ranks."""
    everybodys = contexts(host_of, [pytest.fail] * size)
    return lambda rank, control: open_hierarchy(everybodys[rank], lambda context: wrap_network(network(context)))


def hierarchy(host_of: HostOf, open_network: OpenNetwork) -> OpenWorld:
    """For ``check_transport``."""

    @contextmanager
    def open_world(listeners: Sequence[OnFailure]) -> Iterator[Sequence[Transport]]:
        transports = open_all(host_of, open_network, listeners)
        try:
            yield transports
        finally:
            close_together(transports)

    return partial(open_world)
