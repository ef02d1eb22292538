"""NCCL on the GPUs of this machine: as many ranks as there are GPUs, up to three, as threads of this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from commsched.core.manifest import Manifest, TensorSpec  # noqa: E402
from commsched.devices import open_device  # noqa: E402
from commsched.testing.check_transport import check_transport  # noqa: E402
from commsched.transports.backends.nccl.transport import NcclTransport  # noqa: E402

from .test_transport import Done, make_task  # noqa: E402
from .worlds import nccl_world  # noqa: E402


def gpus() -> int:
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def has_nccl() -> bool:
    from cupy.cuda import nccl

    return bool(nccl.available)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpus() == 0 or not has_nccl(), reason="needs a CUDA device and NCCL")]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_conformance(ranks: int) -> None:
    if gpus() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    check_transport(nccl_world, world_sizes=(ranks,), rounds=20, open_device=lambda rank: open_device(f"cuda:{rank}"))


@pytest.mark.parametrize(
    ("dtype", "largest"), [("float16", 200), ("bfloat16", 256), ("float32", 1 << 20), ("float64", 1 << 20)]
)
def test_an_average_over_seven_ranks_is_rounded_once(dtype: str, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1/7 is not exact: a product with it is not the quotient of every second number. The sum is that of one rank."""
    with nccl_world([pytest.fail]) as [transport]:
        assert isinstance(transport, NcclTransport)
        transport.world_size = 7
        transport.add_group(0, Manifest((TensorSpec("weight", (1000,), "float32"),)))
        expected = bytes_of(np.arange(1, largest // 7), dtype)
        values = bytes_of(np.arange(1, largest // 7) * 7, dtype)  # exact
        device = open_device("cuda:0")
        there, here, stream = device.allocate(values.size), device.allocate_host(values.size), device.stream()
        np.asarray(here)[:] = values
        stream.copy(there, here)
        stream.synchronize()
        done = Done()
        transport.start(make_task(dtype, largest // 7 - 1, there), done)
        assert done.told.wait(60)
        stream.copy(here, there)
        stream.synchronize()
        assert np.array_equal(np.asarray(here), expected)


def bytes_of(values: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(dtype).view(np.uint8)


def test_an_aborted_group_ends_without_a_result() -> None:
    with nccl_world([pytest.fail]) as [transport]:
        assert isinstance(transport, NcclTransport)
        transport._group.abort()
        assert transport._group.error() == "it was aborted"
