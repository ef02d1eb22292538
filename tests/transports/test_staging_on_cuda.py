"""``ps`` and gloo average the memory of a GPU, which all ranks share."""

from __future__ import annotations

import pytest

from commsched.devices import open_device
from commsched.testing.check_transport import check_transport
from tests.transports.worlds import embedded_world, gloo_world, local_world

cupy = pytest.importorskip("cupy")


def gpus() -> int:
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@pytest.mark.gpu
@pytest.mark.skipif(gpus() == 0, reason="needs a GPU")
@pytest.mark.parametrize("open_world", [local_world, embedded_world, gloo_world], ids=["local", "ps", "gloo"])
def test_conformance(open_world: object) -> None:
    check_transport(open_world, world_sizes=(1, 2, 3), rounds=20, open_device=lambda rank: open_device("cuda:0"))
