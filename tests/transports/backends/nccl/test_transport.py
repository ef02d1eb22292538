"""The NCCL transport's own part, over a device that is a thread: what runs on a real one is in test_device.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from commsched.core.errors import ClosedError, CommschedError, OrderMismatch, PeerLost, TransportError  # noqa: E402
from commsched.core.interfaces import Completion, OnFailure, Transport  # noqa: E402
from commsched.core.manifest import ITEMSIZE, Manifest, TensorSpec  # noqa: E402
from commsched.core.plan import Partition  # noqa: E402
from commsched.core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask  # noqa: E402
from commsched.testing.check_transport import check_transport  # noqa: E402
from commsched.transports.backends.nccl.transport import NcclTransport  # noqa: E402
from commsched.transports.collective.failures import DeferredFailure  # noqa: E402

from ...worlds import a_context  # noqa: E402
from .memory_group import MemoryGroup, MemoryNetwork  # noqa: E402


class OverHost(NcclTransport):
    """Takes the host's memory, as the conformance suite has it, for its device's."""

    def start(self, task: CommTask, completion: Completion) -> None:
        if isinstance(task.data, memoryview):  # the all-gather has the data of its reduce-scatter
            task.data = torch.frombuffer(task.data, dtype=torch.uint8)
        super().start(task, completion)


@contextmanager
def memory_world(listeners: Sequence[OnFailure]) -> Iterator[Sequence[Transport]]:
    network = MemoryNetwork(len(listeners))
    transports = [
        OverHost(a_context(rank, len(listeners), on_failure), MemoryGroup(network, rank))
        for rank, on_failure in enumerate(listeners)
    ]
    try:
        yield transports
    finally:
        for transport in transports:
            transport.close()


def test_conformance() -> None:
    check_transport(memory_world, world_sizes=(1, 2, 3), rounds=20)


class Alone:
    """One rank of two; its device does what it is told at once, and keeps count of what it was asked."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.broken = ""
        self.raises: Exception | None = None
        self.closed: list[str] = []

    def all_reduce(self, values) -> None:
        self.calls.append(f"all_reduce {values.dtype} {values.numel()}")

    def reduce_scatter(self, chunks) -> None:
        self.calls.append(f"reduce_scatter {chunks[0].dtype} {[chunk.numel() for chunk in chunks]}")

    def all_gather(self, chunks) -> None:
        self.calls.append(f"all_gather {chunks[0].dtype} {[chunk.numel() for chunk in chunks]}")

    def launch(self, work):
        work()
        return self

    def synchronize(self) -> None:
        if self.raises is not None:
            raise self.raises

    def error(self) -> str:
        return self.broken

    def abort(self) -> None:
        self.closed.append("aborted")

    def close(self) -> None:
        self.closed.append("closed")


class Done:
    def __init__(self) -> None:
        self.tasks: list[CommTask] = []
        self.told = threading.Event()

    def on_sent(self, task: CommTask) -> None:
        raise AssertionError("a collective is sent when it is done")

    def on_done(self, task: CommTask) -> None:
        self.tasks.append(task)
        self.told.set()


def make_task(dtype: str, numel: int, verb: str = ALL_REDUCE, sequence: int = 0, data=None) -> CommTask:
    nbytes = numel * ITEMSIZE[dtype]
    data = torch.zeros(nbytes, dtype=torch.uint8) if data is None else data
    task = CommTask(0, 7, Partition(0, dtype, 0, nbytes, (0,)), data, verb)
    task.sequence = sequence
    return task


@pytest.fixture
def opened():
    """A transport over :class:`Alone`, its device, and what it told as failures."""
    device, failures, listeners = Alone(), [], []
    transport = NcclTransport(replace(a_context(0, 2, failures.append), when_failed=listeners.append), device)
    for group, dtype in enumerate(["float32"]):
        transport.add_group(group, Manifest((TensorSpec("weight", (1000,), dtype),)))
    yield transport, device, failures
    transport.close(graceful=False)


@pytest.mark.parametrize(
    ("dtype", "numel", "verb", "calls"),
    [
        ("float32", 5, ALL_REDUCE, ["all_reduce torch.float32 5"]),
        ("float64", 5, ALL_REDUCE, ["all_reduce torch.float64 5"]),
        ("float16", 5, ALL_REDUCE, ["all_reduce torch.float32 5"]),
        ("bfloat16", 5, REDUCE_SCATTER, ["reduce_scatter torch.float32 [2, 3]"]),
        ("uint8", 5, REDUCE_SCATTER, ["reduce_scatter torch.uint8 [2, 3]"]),
        ("bfloat16", 6, ALL_GATHER, ["all_gather torch.bfloat16 [3, 3]"]),
        ("float32", 1, REDUCE_SCATTER, ["all_reduce torch.float32 1"]),
        ("float32", 1, ALL_GATHER, []),
    ],
)
def test_what_the_device_is_asked_for(opened, dtype: str, numel: int, verb: str, calls: list[str]) -> None:
    transport, device, failures = opened
    done = Done()
    transport.start(make_task(dtype, numel, verb), done)
    assert done.told.wait(60)
    assert device.calls == calls
    assert failures == []


def test_floats_are_divided_and_bytes_are_not(opened) -> None:
    transport, _, _ = opened
    floats, raw = torch.tensor([3.0, 5.0]), torch.tensor([3, 5], dtype=torch.uint8)
    done = Done()
    transport.start(make_task("float32", 2, data=floats.view(torch.uint8)), done)
    transport.start(make_task("uint8", 2, sequence=1, data=raw), done)
    transport.close()
    assert floats.tolist() == [1.5, 2.5]
    assert raw.tolist() == [3, 5]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_are_divided_by_a_tensor_of_their_device(opened, dtype: str) -> None:
    """PyTorch's CUDA kernels multiply by a rounded 1/n instead of dividing by a number; the result is in test_device.py."""
    divisors = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
            if operation.overloadpacket is torch.ops.aten.div_:
                divisors.append(arguments[1])
            return operation(*arguments, **(keywords or {}))

    transport, device, _ = opened
    with Watch():
        transport.start(make_task(dtype, 2), Done())  # by which the device has done it
    assert [isinstance(divisor, torch.Tensor) and divisor.device == device.device for divisor in divisors] == [True]


def test_a_task_out_of_order_is_refused_by_name(opened) -> None:
    transport, device, _ = opened
    transport.start(make_task("float32", 2), Done())
    with pytest.raises(OrderMismatch) as raised:
        transport.start(make_task("float32", 2, sequence=2), Done())
    assert str(raised.value) == (
        "rank 0 was asked to all_reduce tensor 'weight' of step 7 at place 2 of channel 0, but place 1 is next (after 0: "
        "all_reduce tensor 'weight' of step 7)"
    )
    assert len(device.calls) == 1


def test_memory_of_the_host_is_refused_by_name(opened) -> None:
    transport, _, _ = opened
    with pytest.raises(TransportError) as raised:
        transport.start(make_task("float32", 2, data=memoryview(bytearray(8))), Done())
    assert (
        str(raised.value)
        == "rank 0 cannot all_reduce tensor 'weight' of step 7: it lies on the host, and NCCL was opened on cpu"
    )


def failure_of(monkeypatch: pytest.MonkeyPatch, prepare) -> CommschedError:
    """What a transport tells of its first task on a device that ``prepare`` has broken."""
    monkeypatch.setattr(
        "commsched.transports.backends.nccl.transport.DeferredFailure", partial(DeferredFailure, grace_seconds=0.0)
    )
    device, told, failures = Alone(), threading.Event(), []

    def on_failure(error: CommschedError) -> None:
        failures.append(error)
        told.set()

    transport = NcclTransport(a_context(1, 2, on_failure), device)
    transport.add_group(0, Manifest((TensorSpec("weight", (1000,), "float32"),)))
    prepare(device)
    done = Done()
    transport.start(make_task("float32", 2), done)
    assert told.wait(60)
    transport.close()
    assert done.tasks == []
    assert device.closed == ["aborted"]  # though it was to be graceful: a task is unfinished
    return failures[0]


def test_a_broken_group_is_told_and_its_result_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    error = failure_of(monkeypatch, lambda device: setattr(device, "broken", "NCCL reports REMOTE_ERROR"))
    assert isinstance(error, PeerLost)
    assert str(error) == (
        "rank 1 lost contact with another rank while it tried to all_reduce tensor 'weight' of step 7: "
        "NCCL reports REMOTE_ERROR"
    )


def test_an_event_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    error = failure_of(monkeypatch, lambda device: setattr(device, "raises", RuntimeError("CUDA error")))
    assert type(error) is TransportError
    assert str(error) == "rank 1 failed to all_reduce tensor 'weight' of step 7: RuntimeError: CUDA error"


def test_a_launch_that_raises_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(work):
        raise RuntimeError("ncclInternalError")

    error = failure_of(monkeypatch, lambda device: setattr(device, "launch", launch))
    assert type(error) is TransportError
    assert str(error) == "rank 1 failed to all_reduce tensor 'weight' of step 7: RuntimeError: ncclInternalError"


def test_close_is_graceful_when_nothing_is_launched_and_aborts_else() -> None:
    for graceful, how in ((True, "closed"), (False, "aborted")):
        device = Alone()
        transport = NcclTransport(a_context(0, 2, lambda error: None), device)
        transport.add_group(0, Manifest((TensorSpec("weight", (1000,), "float32"),)))
        transport.close(graceful)
        transport.close(graceful)
        assert device.closed == [how]
        with pytest.raises(ClosedError, match="this transport is closed"):
            transport.start(make_task("float32", 2), Done())
    assert not [thread for thread in threading.enumerate() if thread.name == "commsched-nccl"]
