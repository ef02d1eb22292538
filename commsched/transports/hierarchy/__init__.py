"""Hierarchy: the ranks of a host sum in shared memory, and one of them, the leader, averages with the other hosts.

Any transport that averages host memory may serve as the network. It sees one rank per host.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from ...core.interfaces import Transport
from ...core.manifest import Manifest
from ...core.world import World
from ..backend import Contributors, TransportContext
from ..wire import WireTransport
from .leader import LeaderTransport
from .member import MemberTransport
from .topology import NETWORK_SETTINGS, HostRendezvous, HostTopology, RankLocation, connect_to_leader, is_wanted

log = logging.getLogger("commsched")

#: Opens the network transport, in the world of the given context.
OpenNetwork = Callable[[TransportContext], Transport]


def open_hierarchy(context: TransportContext, open_network: OpenNetwork) -> Transport:
    """Open the transport that ``settings.hierarchy`` and ``settings.wire`` ask for.

    ``open_network`` opens the network transport, over all ranks, or over one rank per host behind a hierarchy. Collective:
    every rank of the job calls it.

    Raises:
        ConfigError: the settings require a hierarchy, and it is not possible.
        PeerTimeout: a rank of this host did not connect in time.
    """
    if context.settings.hierarchy == "off":
        return open_flat(context, open_network)
    own = RankLocation(context.host, context.world.local_rank, hasattr(os, "memfd_create"), bool(_of_network(context)))
    seats = [RankLocation(**record) for record in context.gather(asdict(own))]
    layout = HostTopology.of(seats)
    meshed = not context.settings.servers
    if not is_wanted(context.settings.hierarchy, context.settings.collective, layout, seats, meshed):
        return open_flat(context, open_network)
    if context.world.rank in layout.leaders:
        return _lead(context, layout, open_network)
    return _follow(context, layout)


def _of_network(context: TransportContext) -> list[str]:
    """The settings of how to use the network that the user has set, with their values."""
    settings = context.settings
    changed = settings.changed("some_transports")
    chosen = ["transport"] if "transport" in settings.given and settings.transport != "auto" else []
    return [settings.text_of(name) for name in (*chosen, *NETWORK_SETTINGS) if name in chosen or name in changed]


def open_flat(context: TransportContext, open_network: OpenNetwork) -> Transport:
    """Open the network transport over all ranks, inside the wire dtype if ``settings.wire`` asks for one. Collective."""
    network = open_network(context)
    return network if context.settings.wire == "none" else WireTransport(network, context.settings.wire)


# A gather includes every rank of the job, so all ranks take part in what the leaders gather while the network opens. Members
# take part until their leader reports "open". They read their link only afterwards, so that a leader that fails is known by the
# error that it reports and not by the end of its link.


def _lead(context: TransportContext, layout: HostTopology, open_network: OpenNetwork) -> LeaderTransport:
    rank = context.world.rank
    members = [each for each in layout.hosts[layout.host_of(rank)] if each != rank]
    with ExitStack() as undo:
        meeting = HostRendezvous(members)
        undo.callback(meeting.close)
        context.gather(meeting.name)
        links = meeting.wait(context.settings.join_within, context.when_failed)
        for link in links.values():
            undo.callback(link.close)
        network: Transport | None = None
        if len(layout.hosts) > 1 or context.settings.servers:  # servers wait for a worker, even from a single host
            network = open_network(_among_leaders(context, layout))
            undo.callback(network.close, graceful=False)
        else:
            for setting in _of_network(context):
                log.warning("%s has no effect: with hierarchy=on the ranks of a single host use no network", setting)
        ordered, channels = (network.ordered, network.channels) if network is not None else (False, 1)
        rows = 0 if network is None or ordered else network.norm_rows(Manifest(()))
        context.gather(["open", ordered, channels, rows, 1 if network is None else network.servers])
        transport = LeaderTransport(context, layout, links, network)
        undo.pop_all()
    meeting.close()
    return transport


def _follow(context: TransportContext, layout: HostTopology) -> MemberTransport:
    rank = context.world.rank
    host = layout.hosts[layout.host_of(rank)]
    names = context.gather(None)
    link = connect_to_leader(names[host[0]], rank, host[0])
    try:
        said: list[Any] = ["opening"]
        while said[0] != "open":
            said = context.gather(["waiting"])[host[0]]
        _, ordered, channels, rows, servers = said
        return MemberTransport(context, link, host[0], layout.leader_of if ordered else (), channels, rows, servers)
    except BaseException:
        link.close()
        raise


def _among_leaders(context: TransportContext, layout: HostTopology) -> TransportContext:
    """Return a context in which every host is one rank, for the leaders."""

    def gather(value: Any) -> list[Any]:
        everybodys = context.gather(["opening", value])
        return [everybodys[leader][1] for leader in layout.leaders]

    host = layout.host_of(context.world.rank)
    world = World(host, len(layout.hosts), 0, 1, context.world.launcher)
    return replace(context, world=world, gather=gather, contributors=Contributors(layout.leaders, context.world.world_size))
