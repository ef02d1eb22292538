"""Worlds of transports whose ranks are threads of the test's process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from commsched.core.interfaces import OnFailure, Transport
from commsched.core.world import World
from commsched.settings import Settings
from commsched.testing.world import run_world
from commsched.transports.backends.local import LocalWorld
from commsched.transports.backends.ps.rate_limiter import RateLimiter
from commsched.transports.backends.ps.shard import Shard
from commsched.transports.backends.ps.transport import PsTransport
from commsched.transports.context import TransportContext

from .ordered import OrderedWorld

TOKEN = "a secret of the tests"


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
    listeners: Sequence[OnFailure], *, lane: str = "tcp", rate_bytes_per_second: float | None = None
) -> Iterator[Sequence[PsTransport]]:
    """Every rank hosts a shard, over a real network."""
    size = len(listeners)
    with ExitStack() as stack:
        pacers = [None if rate_bytes_per_second is None else RateLimiter(rate_bytes_per_second) for _ in listeners]
        shards = []
        for rank, on_failure in enumerate(listeners):
            name = f"rank {rank}'s shard"
            shard = Shard("127.0.0.1:0", TOKEN, size, lane=lane, on_failure=on_failure, name=name, pacer=pacers[rank])
            shards.append(shard)
            stack.callback(shards[rank].close)
        addresses = [shard.address for shard in shards]

        def connect(rank: int) -> PsTransport:
            return PsTransport(
                rank,
                size,
                addresses,
                TOKEN,
                lane=lane,
                on_failure=listeners[rank],
                own_shard=shards[rank],
                pacer=pacers[rank],
                connect_within_seconds=20.0,
            )

        transports = run_world(size, connect)
        stack.callback(close_together, transports)
        yield transports


@contextmanager
def separate_world(listeners: Sequence[OnFailure], *, lane: str = "tcp", servers: int = 2) -> Iterator[Sequence[PsTransport]]:
    """Servers that no rank hosts, over a real network."""
    size = len(listeners)
    with ExitStack() as stack:
        shards = []
        for index in range(servers):
            shard = Shard("127.0.0.1:0", TOKEN, None, lane=lane, on_failure=lambda error: None, name=f"server {index}")
            shards.append(shard)
            stack.callback(shard.close)
        addresses = [shard.address for shard in shards]

        def connect(rank: int) -> PsTransport:
            return PsTransport(rank, size, addresses, TOKEN, lane=lane, on_failure=listeners[rank], connect_within_seconds=20.0)

        transports = run_world(size, connect)
        stack.callback(close_together, transports)
        yield transports


@contextmanager
def gloo_world(listeners: Sequence[OnFailure]) -> Iterator[Sequence[Transport]]:
    """All-reduce over gloo, over a real network; skipped without PyTorch."""
    pytest.importorskip("torch.distributed")
    from commsched.transports.backends.gloo import open_transport

    size, meeting = len(listeners), Meeting(len(listeners))
    transports = run_world(size, lambda rank: open_transport(meeting.context(rank, listeners[rank])))
    try:
        yield transports
    finally:
        close_together(transports)


class Meeting:
    """What ranks that are threads know of each other: stands in for the control channel while a transport opens."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._values: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size)

    def context(self, rank: int, on_failure: OnFailure, **settings: Any) -> TransportContext:
        return TransportContext(
            world=World(rank, self._world_size, rank, self._world_size, "threads"),
            settings=Settings(**settings),
            host="127.0.0.1",
            token=TOKEN,
            control_address="127.0.0.1:1",
            gather=partial(self._gather, rank),
            on_failure=on_failure,
            when_failed=lambda callback: None,
        )

    def _gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = json.dumps(value)  # as the control channel would
        self._barrier.wait(30.0)
        values = [json.loads(each) for each in self._values]
        self._barrier.wait(30.0)
        return values


def close_together(transports: Sequence[Transport]) -> None:
    run_world(len(transports), lambda rank: transports[rank].close())
