"""The parameter server: embedded, where every rank hosts a shard, or separate ``commsched server`` processes."""

from __future__ import annotations

from ...context import TransportContext
from .rate_limiter import RateLimiter
from .shard import Shard
from .transport import PsTransport


def open_transport(context: TransportContext) -> PsTransport:
    """Open the transport of this rank, over ``settings.servers`` or, if there are none, over a shard in every rank.

    Collective: every rank calls it. Returns when all servers have answered.

    Raises:
        ConfigError: a server has another token or another job.
        PeerTimeout: a server did not answer in time; names the server.
    """
    settings, rank = context.settings, context.world.rank
    members, divisor = context.members, context.divisor
    host = f"[{context.host}]" if ":" in context.host else context.host  # an IPv6 address before a port is written in brackets
    pacer = RateLimiter(settings.rate) if settings.rate is not None else None
    shard: Shard | None = None
    try:
        addresses = list(settings.servers)
        if not addresses:
            shard = Shard(
                f"{host}:0",
                context.token,
                context.world.world_size,
                lane=settings.lane,
                on_failure=context.on_failure,
                name=f"rank {members[rank]}'s shard",
                pacer=pacer,
                fail_after_seconds=settings.fail_after,
                members=members,
                divisor=divisor,
                job=context.job,
            )
            addresses = context.gather(shard.address)
        return PsTransport(
            rank,
            context.world.world_size,
            addresses,
            context.token,
            lane=settings.lane,
            on_failure=context.on_failure,
            own_shard=shard,
            pacer=pacer,
            control_address=context.control_address,
            fail_after_seconds=settings.fail_after,
            connect_within_seconds=settings.join_within,
            when_failed=context.when_failed,
            members=members,
            divisor=divisor,
            job=context.job,
            could_not_start=context.could_not_start,
        )
    except BaseException:
        for part in (shard, pacer):
            if part is not None:
                part.close()
        raise
