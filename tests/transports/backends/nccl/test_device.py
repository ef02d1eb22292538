"""NCCL on a real device, as far as one goes: a group of one rank. Several ranks: ``tests/plugins/torch/test_cuda.py``."""

from __future__ import annotations

from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from commsched.core.manifest import Manifest, TensorSpec  # noqa: E402
from commsched.core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER  # noqa: E402
from commsched.transports.backends.nccl.group import NcclGroup  # noqa: E402
from commsched.transports.backends.nccl.transport import NcclTransport  # noqa: E402

from ...worlds import a_context  # noqa: E402
from .test_transport import Done, make_task  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and torch.distributed.is_nccl_available()), reason="needs a CUDA device and NCCL"
    ),
]


@pytest.fixture
def transport():
    device = torch.device("cuda", torch.cuda.current_device())
    group = NcclGroup(torch.distributed.HashStore(), 0, 1, device, timedelta(seconds=60))
    failures: list[Exception] = []
    transport = NcclTransport(a_context(0, 1, failures.append), group)
    transport.add_group(0, Manifest((TensorSpec("weight", (1000,), "float32"),)))
    yield transport
    transport.close()
    assert failures == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "uint8"])
def test_every_dtype_and_verb(transport: NcclTransport, dtype: str) -> None:
    values = (torch.arange(1001, device=transport.device) % 100).to(getattr(torch, dtype))
    before = values.clone()
    torch.cuda.synchronize()
    for sequence, verb in enumerate((ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)):
        done = Done()
        transport.start(make_task(dtype, 1001, verb, sequence, values.view(torch.uint8)), done)
        assert done.told.wait(60)
        assert torch.equal(values, before)


@pytest.mark.parametrize(
    ("dtype", "largest"), [("float16", 200), ("bfloat16", 256), ("float32", 1 << 20), ("float64", 1 << 20)]
)
def test_an_average_over_seven_ranks_is_rounded_once(dtype: str, largest: int) -> None:
    """1/7 is not exact: a product with it is not the quotient of every second number. The sum is that of one rank."""
    device = torch.device("cuda", torch.cuda.current_device())
    group = NcclGroup(torch.distributed.HashStore(), 0, 1, device, timedelta(seconds=60))
    transport = NcclTransport(a_context(0, 7, pytest.fail), group)
    transport.add_group(0, Manifest((TensorSpec("weight", (1000,), "float32"),)))
    expected = torch.arange(1, largest // 7, device=device).to(getattr(torch, dtype))
    values = expected * 7  # exact
    torch.cuda.synchronize()
    done = Done()
    transport.start(make_task(dtype, values.numel(), data=values.view(torch.uint8)), done)
    assert done.told.wait(60)
    assert torch.equal(values, expected)
    transport.close()


def test_an_aborted_group_ends_without_a_result(transport: NcclTransport) -> None:
    transport._group.abort()
    assert transport._group.error() == "it was aborted"
