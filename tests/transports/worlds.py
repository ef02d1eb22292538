"""Worlds of transports whose ranks are threads of the test's process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from commsched.core.ports import OnFailure, Transport
from commsched.testing.world import run_world
from commsched.transports.local import LocalWorld
from commsched.transports.ps.pacer import Pacer
from commsched.transports.ps.shard import Shard
from commsched.transports.ps.transport import PsTransport

TOKEN = "a secret of the tests"


@contextmanager
def local_world(listeners: Sequence[OnFailure]) -> Iterator[Sequence[Transport]]:
    world = LocalWorld(len(listeners))
    transports = [world.transport(rank, on_failure) for rank, on_failure in enumerate(listeners)]
    try:
        yield transports
    finally:
        for transport in transports:
            transport.close()


@contextmanager
def embedded_world(
    listeners: Sequence[OnFailure], *, lane: str = "tcp", rate_bytes_per_second: float | None = None
) -> Iterator[Sequence[PsTransport]]:
    """Every rank hosts a shard, over a real network."""
    size = len(listeners)
    with ExitStack() as stack:
        pacers = [None if rate_bytes_per_second is None else Pacer(rate_bytes_per_second) for _ in listeners]
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


def close_together(transports: Sequence[Transport]) -> None:
    run_world(len(transports), lambda rank: transports[rank].close())
