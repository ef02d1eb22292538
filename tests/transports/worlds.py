"""Worlds of transports whose ranks are threads of the test's process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from commsched.core.interfaces import OnFailure, Transport
from commsched.settings import Settings
from commsched.testing.checked_world import Meeting, world_of
from commsched.testing.world import run_world
from commsched.transports.backend import Contributors, TransportContext
from commsched.transports.backends.local import LocalWorld
from commsched.transports.backends.ps.server import Shard
from commsched.transports.backends.ps.service import ServiceContext
from commsched.transports.backends.ps.stream import StreamOptions
from commsched.transports.backends.ps.transport import PsTransport

from .ordered import OrderedWorld

TOKEN = Meeting.TOKEN


def a_context(rank: int, world_size: int, on_failure: OnFailure, **settings: Any) -> TransportContext:
    """The arguments of a transport that gathers nothing."""
    return replace(Meeting(world_size).context(rank, on_failure, **settings), gather=lambda value: [])


def a_shard(
    world_size: int | None,
    on_failure: OnFailure,
    name: str = "the server",
    address: str = "127.0.0.1:0",
    token: str = TOKEN,
    **settings: Any,
) -> Shard:
    contributors = None if world_size is None else Contributors.all_ranks(world_size)
    return Shard(address, StreamOptions.of(Settings(**settings), token), ServiceContext(name, on_failure, contributors))


def open_ps(context: TransportContext, servers: Sequence[str]) -> PsTransport:
    return PsTransport(context, StreamOptions.of(context.settings, context.token), servers)


@contextmanager
def in_memory_world(make_world: Any, listeners: Sequence[OnFailure]) -> Iterator[Sequence[Transport]]:
    world = make_world(len(listeners))
    transports = [world.transport(rank, on_failure) for rank, on_failure in enumerate(listeners)]
    try:
        yield transports
    finally:
        for transport in transports:
            transport.close()


#: A parameter server in memory, and collectives without identity.
local_world = partial(in_memory_world, LocalWorld)
ordered_world = partial(in_memory_world, OrderedWorld)


@contextmanager
def embedded_world(
    listeners: Sequence[OnFailure], *, lane: str = "tcp", flows: int = 1, rate_bytes_per_second: float | None = None
) -> Iterator[Sequence[PsTransport]]:
    """Every rank hosts a shard, over a real network."""
    size = len(listeners)
    with ExitStack() as stack:
        options = [StreamOptions.of(Settings(lane=lane, rate=rate_bytes_per_second), TOKEN) for _ in listeners]
        shards = []
        for rank, on_failure in enumerate(listeners):
            name = f"rank {rank}'s shard"
            context = ServiceContext(name, on_failure, Contributors.all_ranks(size))
            shards.append(Shard("127.0.0.1:0", options[rank], context))
            stack.callback(shards[rank].close)
        addresses = [shard.address for shard in shards]

        def connect(rank: int) -> PsTransport:
            context = a_context(rank, size, listeners[rank], flows=flows, join_within=60.0)
            return PsTransport(context, options[rank], addresses, shards[rank])

        transports = run_world(size, connect)
        stack.callback(close_together, transports)
        yield transports


@contextmanager
def separate_world(
    listeners: Sequence[OnFailure], *, lane: str = "tcp", flows: int = 1, servers: int = 2
) -> Iterator[Sequence[PsTransport]]:
    """Servers that no rank hosts, over a real network."""
    size = len(listeners)
    with ExitStack() as stack:
        shards = []
        for index in range(servers):
            shards.append(a_shard(None, lambda error: None, f"server {index}", lane=lane))
            stack.callback(shards[index].close)
        addresses = [shard.address for shard in shards]

        def connect(rank: int) -> PsTransport:
            return open_ps(a_context(rank, size, listeners[rank], lane=lane, flows=flows, join_within=60.0), addresses)

        transports = run_world(size, connect)
        stack.callback(close_together, transports)
        yield transports


@contextmanager
def gloo_world(listeners: Sequence[OnFailure], **settings: Any) -> Iterator[Sequence[Transport]]:
    """All-reduce over gloo, over a real network; skipped without PyTorch."""
    pytest.importorskip("torch.distributed")
    from commsched.transports.backends.gloo import open_transport

    with world_of(open_transport, **settings)(listeners) as transports:
        yield transports


def close_together(transports: Sequence[Transport]) -> None:
    run_world(len(transports), lambda rank: transports[rank].close())
