"""Ranks of a host add up in memory, hosts over any network: the same averages as without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from commsched.core.interfaces import Transport
from commsched.settings import Settings
from commsched.testing.check_transport import check_leaver, check_results, check_transport
from commsched.testing.checked_world import OpenWorld, Threads
from commsched.testing.world import run_world
from commsched.transports.backend import TransportContext
from commsched.transports.backends.ps import open_transport as open_ps
from commsched.transports.hierarchy import open_hierarchy, topology

from ..worlds import close_together
from .worlds import HostOf, LocalNetwork, OrderedNetwork, contexts, hierarchy, open_all


def in_pairs(rank: int) -> int:
    return rank // 2


def three_and_the_rest(rank: int) -> int:
    return rank // 3


def in_turns(rank: int) -> int:
    return rank % 2


def on_one_host(rank: int) -> int:
    return 0


def check(open_world: OpenWorld, world_size: int) -> None:
    """What depends on the layout of hosts; not large tensors, which are checked with two ranks."""
    check_results(partial(Threads, open_world, world_size), rounds=6)
    check_leaver(open_world)


#: So many ranks that there are three hosts or two.
SEVERAL_HOSTS = [(in_pairs, 5), (three_and_the_rest, 4)]


@pytest.mark.parametrize("host_of", [in_turns, on_one_host])
def test_is_a_transport_over_memory(host_of: HostOf) -> None:
    check_transport(hierarchy(host_of, LocalNetwork), world_sizes=(1, 2, 3, 5), rounds=20)


@pytest.mark.parametrize(("host_of", "world_size"), SEVERAL_HOSTS)
def test_several_hosts_over_memory(host_of: HostOf, world_size: int) -> None:
    check(hierarchy(host_of, LocalNetwork), world_size)


@pytest.mark.parametrize("host_of", [in_pairs, three_and_the_rest])
def test_is_a_transport_over_collectives_that_do_not_see_a_wrong_order(host_of: HostOf) -> None:
    check_transport(hierarchy(host_of, OrderedNetwork), world_sizes=(5,), rounds=20)


@pytest.mark.parametrize(("host_of", "world_size"), SEVERAL_HOSTS)
def test_is_a_transport_over_a_parameter_server(host_of: HostOf, world_size: int) -> None:
    check(hierarchy(host_of, lambda: open_ps), world_size)


def test_partitions_are_for_the_shards_of_all_hosts() -> None:
    """Those of members too, since partitions depend on the number of shards."""
    transports = open_all(in_pairs, lambda: open_ps, [pytest.fail] * 5)
    assert [each.servers for each in transports] == [3] * 5
    close_together(transports)


@pytest.mark.parametrize(("host_of", "world_size"), SEVERAL_HOSTS)
def test_is_a_transport_over_gloo(host_of: HostOf, world_size: int) -> None:
    pytest.importorskip("torch.distributed")
    from commsched.transports.backends.gloo import open_transport

    check(hierarchy(host_of, lambda: open_transport), world_size)


@pytest.mark.parametrize("servers", [(), ("127.0.0.1:1",)])
def test_of_the_only_host_the_leader_meets_servers_which_wait_for_somebody(servers: tuple[str, ...]) -> None:
    worlds: list[int] = []

    class Network(LocalNetwork):
        def __call__(self, context: TransportContext) -> Transport:
            worlds.append(context.world.world_size)
            return super().__call__(context)

    close_together(open_all(on_one_host, Network, [pytest.fail] * 2, servers=servers))
    assert worlds == [1] * len(servers)


@pytest.mark.parametrize(
    "setting",
    [
        {"rate": "200mbit"},
        {"lane": "grpc"},
        {"order": "static"},
        {"transport": "ps"},
        {"transport": "gloo"},
        {"wire": "bfloat16"},
    ],
)
def test_what_a_user_set_of_the_network_is_not_ignored_on_one_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, setting: dict[str, str]
) -> None:
    monkeypatch.setattr(topology, "MAX_MESH", 1)
    opened: list[int] = []

    class Network(LocalNetwork):
        def __call__(self, context: TransportContext) -> Transport:
            opened.append(context.world.world_size)
            return super().__call__(context)

    def open_with(**settings: str) -> list[str]:
        opened.clear()
        caplog.clear()
        given = Settings.load(settings, {})
        everybodys = [replace(each, settings=given) for each in contexts(on_one_host, [pytest.fail] * 2)]
        network = Network()
        close_together(run_world(2, lambda rank: open_hierarchy(everybodys[rank], network)))
        return caplog.messages

    for nothing in ({}, {"transport": "auto"}, {"wire": "none"}):
        assert open_with(**nothing) == []
        assert opened == []
    assert open_with(**setting) == []
    assert opened == [2, 2]
    [[name, _]] = setting.items()
    [warned] = open_with(hierarchy="on", **setting)
    assert warned.startswith(f"{name}=")
    assert warned.endswith("has no effect: with hierarchy=on the ranks of a single host use no network")
