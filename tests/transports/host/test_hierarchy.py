"""Ranks of a host add up in memory, hosts over any network: the same averages as without."""

from __future__ import annotations

import pytest

from commsched.testing.check_transport import check_transport
from commsched.transports.ps import open_transport as open_ps

from .worlds import HostOf, LocalNetwork, hierarchy

pytestmark = pytest.mark.timeout(180)


def in_pairs(rank: int) -> int:
    return rank // 2


def three_and_the_rest(rank: int) -> int:
    return rank // 3


def in_turns(rank: int) -> int:
    return rank % 2


def on_one_host(rank: int) -> int:
    return 0


@pytest.mark.parametrize("host_of", [in_pairs, three_and_the_rest, in_turns, on_one_host])
def test_is_a_transport_over_memory(host_of: HostOf) -> None:
    check_transport(hierarchy(host_of, LocalNetwork), rounds=60)


#: So many ranks that there are two hosts or three.
SEVERAL_HOSTS = [(in_pairs, (3, 5)), (three_and_the_rest, (4,))]


@pytest.mark.parametrize(("host_of", "world_sizes"), SEVERAL_HOSTS)
def test_is_a_transport_over_a_parameter_server(host_of: HostOf, world_sizes: tuple[int, ...]) -> None:
    check_transport(hierarchy(host_of, lambda: open_ps), world_sizes=world_sizes, rounds=60)


@pytest.mark.parametrize(("host_of", "world_sizes"), SEVERAL_HOSTS)
def test_is_a_transport_over_gloo(host_of: HostOf, world_sizes: tuple[int, ...]) -> None:
    pytest.importorskip("torch.distributed")
    from commsched.transports.gloo import open_transport

    check_transport(hierarchy(host_of, lambda: open_transport), world_sizes=world_sizes, rounds=60)
