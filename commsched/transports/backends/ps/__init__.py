"""The parameter server: embedded, where every rank hosts a shard, or separate ``commsched server`` processes."""

from __future__ import annotations

from ....settings import together
from ...backend import Backend, TransportContext
from .server import Shard
from .service import ServiceContext
from .stream import StreamOptions
from .transport import PsTransport


def open_transport(context: TransportContext) -> PsTransport:
    """Open the transport of this rank, over ``settings.servers`` or, if there are none, over a shard in every rank.

    Collective: every rank calls it. Returns when all servers have answered. Raises as :class:`PsTransport` does.
    """
    options = StreamOptions.of(context.settings, context.token)
    shard: Shard | None = None
    try:
        addresses = list(context.settings.servers)
        if not addresses:
            name = f"rank {context.job_rank}'s shard"
            hosts = [context.host, *context.settings.hosts[1:]]
            address = together(f"[{host}]:0" if ":" in host else f"{host}:0" for host in hosts)
            shard = Shard(address, options, ServiceContext(name, context.on_failure, context.contributors, context.job))
            addresses = context.gather(shard.address)
        return PsTransport(context, options, addresses, shard)
    except BaseException:
        if shard is not None:
            shard.close()
        options.close()
        raise


BACKEND = Backend(
    open_transport,
    settings=frozenset({"servers", "lane", "flows", "security", "rate", "wire", "hierarchy"}),
    listens_at_host=True,
)
