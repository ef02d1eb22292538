"""Worlds of the NCCL transport whose ranks are threads, over a stand-in for cupy."""

from __future__ import annotations

from dataclasses import replace

from commsched.testing.checked_world import OpenWorld, world_of
from commsched.transports.backend import TransportContext
from commsched.transports.backends.nccl import open_transport
from commsched.transports.backends.nccl.transport import NcclTransport


def open_on_own_device(context: TransportContext) -> NcclTransport:
    return open_transport(replace(context, device=f"cuda:{context.world.rank}"))


nccl_world: OpenWorld = world_of(open_on_own_device)
