"""Every transport that averages in the host's memory averages that of a device. Over MPI: see ``backends/mpi``."""

from __future__ import annotations

from functools import partial

import pytest

from commsched.core.errors import UnsupportedError
from commsched.core.interfaces import Transport
from commsched.testing import SimulatedDevice
from commsched.testing.check_transport import check_results, check_transport
from commsched.testing.checked_world import Threads
from commsched.transports.backend import TransportContext
from commsched.transports.backends.ps import open_transport as open_ps
from tests.transports.hierarchy.worlds import LocalNetwork, OpenNetwork, OrderedNetwork, hierarchy
from tests.transports.worlds import embedded_world, gloo_world, local_world, ordered_world


def device_of(rank: int) -> SimulatedDevice:
    return SimulatedDevice(seed=rank, number=rank)


@pytest.mark.parametrize(
    ("open_world", "sizes", "rounds"),
    [
        pytest.param(local_world, (1, 2, 3), 30, id="local"),
        pytest.param(ordered_world, (1, 2, 3), 20, id="ordered"),
        pytest.param(embedded_world, (1, 2, 3), 20, id="ps"),
        pytest.param(gloo_world, (3,), 8, id="gloo"),  # other channels under the transport of "ordered"
    ],
)
def test_conformance(open_world: object, sizes: tuple[int, ...], rounds: int) -> None:
    check_transport(open_world, world_sizes=sizes, rounds=rounds, open_device=device_of)


def open_gloo(context: TransportContext) -> Transport:
    pytest.importorskip("torch.distributed")
    from commsched.transports.backends.gloo import open_transport

    return open_transport(context)


@pytest.mark.usefixtures("everything_is_pinned")
@pytest.mark.parametrize(
    ("network", "rounds"),
    [
        pytest.param(LocalNetwork, 80, id="local"),
        pytest.param(OrderedNetwork, 80, id="ordered"),
        pytest.param(lambda: open_ps, 40, id="ps"),
        pytest.param(lambda: open_gloo, 40, id="gloo"),
    ],
)
def test_conformance_of_a_hierarchy(network: OpenNetwork, rounds: int) -> None:
    """Two ranks on one host, with a device each, and one on another."""
    check_transport(hierarchy(lambda rank: rank // 2, network), world_sizes=(3,), rounds=rounds, open_device=device_of)


class PinsNothing(SimulatedDevice):
    def pin(self, memory: memoryview) -> memoryview:
        raise UnsupportedError("nothing can be pinned")


def test_conformance_of_a_hierarchy_where_little_memory_is_not_pinned() -> None:
    """Large tensors are pinned, and small ones are not."""
    check_transport(hierarchy(lambda rank: rank // 2, LocalNetwork), world_sizes=(3,), rounds=20, open_device=device_of)


@pytest.mark.usefixtures("everything_is_pinned")
def test_conformance_of_a_hierarchy_where_shared_memory_cannot_be_pinned() -> None:
    """Rank 1 is a member, and rank 2 leads rank 3."""

    def open_device(rank: int) -> SimulatedDevice:
        return PinsNothing(seed=rank, number=rank) if rank in (1, 2) else device_of(rank)

    open_ranks = partial(Threads, hierarchy(lambda rank: rank // 2, LocalNetwork), 4, 60.0, open_device)
    check_results(open_ranks, rounds=8)
