"""Every transport that averages in the host's memory averages that of a device. Over MPI: see ``backends/mpi``."""

from __future__ import annotations

import pytest

from commsched.testing import SimulatedDevice
from commsched.testing.check_transport import check_transport
from tests.transports.hierarchy.worlds import LocalNetwork, hierarchy
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
        pytest.param(hierarchy(lambda rank: rank // 2, LocalNetwork), 8, id="hierarchy"),
    ],
)
def test_conformance(open_world: object, rounds: int) -> None:
    check_transport(open_world, world_sizes=(1, 2, 3), rounds=rounds, open_device=device_of)
