"""Every transport that averages in the host's memory averages that of a device. Over MPI: see ``backends/mpi``."""

from __future__ import annotations

import pytest

from commsched.testing import SimulatedDevice
from commsched.testing.check_transport import check_transport
from tests.transports.hierarchy.worlds import LocalNetwork, OrderedNetwork, hierarchy
from tests.transports.worlds import embedded_world, gloo_world, local_world, ordered_world


def device_of(rank: int) -> SimulatedDevice:
    return SimulatedDevice(seed=rank, number=rank)


@pytest.mark.parametrize(
    ("open_world", "rounds"),
    [
        pytest.param(local_world, 30, id="local"),
        pytest.param(ordered_world, 20, id="ordered"),
        pytest.param(embedded_world, 20, id="ps"),
        pytest.param(gloo_world, 8, id="gloo"),
    ],
)
def test_conformance(open_world: object, rounds: int) -> None:
    check_transport(open_world, world_sizes=(1, 2, 3), rounds=rounds, open_device=device_of)


@pytest.mark.parametrize("network", [LocalNetwork, OrderedNetwork])
def test_conformance_of_a_hierarchy(network: type[LocalNetwork]) -> None:
    """Two ranks on one host, with a device each, and one on another."""
    check_transport(hierarchy(lambda rank: rank // 2, network), world_sizes=(3,), rounds=80, open_device=device_of)
