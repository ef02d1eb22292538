"""The NCCL transport over a stand-in for cupy, whose operations are late and meet as those of NCCL. On GPUs: test_device.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from commsched.core.errors import ClosedError, CommschedError, OrderMismatch, PeerLost, TransportError
from commsched.core.manifest import ITEMSIZE, Manifest, TensorSpec
from commsched.core.plan import Partition
from commsched.core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask
from commsched.devices import open_device
from commsched.testing import SimulatedDevice
from commsched.testing.check_transport import check_transport
from commsched.testing.world import run_world
from commsched.transports.backends.nccl.group import NcclGroup
from commsched.transports.collective.failures import DeferredFailure

from .worlds import nccl_world


def test_conformance(cupy: Any) -> None:
    check_transport(nccl_world, world_sizes=(3,), rounds=50, open_device=lambda rank: open_device(f"cuda:{rank}"))


class Done:
    def __init__(self) -> None:
        self.tasks: list[CommTask] = []
        self.told = threading.Event()

    def on_sent(self, task: CommTask) -> None:
        raise AssertionError("a collective is sent when it is done")

    def on_done(self, task: CommTask) -> None:
        self.tasks.append(task)
        self.told.set()


def make_task(dtype: str, numel: int, data: Any, verb: str = ALL_REDUCE, sequence: int = 0) -> CommTask:
    nbytes = numel * ITEMSIZE[dtype]
    task = CommTask(0, 7, Partition(0, dtype, 0, nbytes, (0,)), data, verb)
    task.sequence = sequence
    return task


Opened = tuple[Sequence[Any], list[CommschedError]]


@contextmanager
def opened_world(size: int) -> Iterator[Opened]:
    """Transports of so many ranks, and what they tell as failures, at once."""
    failures: list[CommschedError] = []
    told = threading.Event()

    def on_failure(error: CommschedError) -> None:
        failures.append(error)
        told.set()

    at_once = partial(DeferredFailure, grace_seconds=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("commsched.transports.backends.nccl.transport.DeferredFailure", at_once)
        with nccl_world([on_failure] * size) as transports:
            for transport in transports:
                transport.add_group(0, Manifest((TensorSpec("weight", (1000,), "float32"),)))
                transport.told = told
            yield transports, failures


@pytest.fixture
def opened(cupy: Any) -> Iterator[Opened]:
    with opened_world(2) as opened:
        yield opened


def on_device(rank: int, values: Any) -> Any:
    """``values`` in the memory of the rank's GPU."""
    device = open_device(f"cuda:{rank}")
    there, here, stream = device.allocate(values.nbytes), device.allocate_host(values.nbytes), device.stream()
    np.asarray(here)[:] = values.view(np.uint8)
    stream.copy(there, here)
    stream.synchronize()
    return there


def seen(gpu: SimulatedDevice, memory: Any, dtype: str) -> list[float]:
    return np.frombuffer(gpu.peek(memory.data.buffer[: memory.nbytes]), dtype).tolist()


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operations that groups are asked for, by all ranks."""
    calls: list[str] = []
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        of = getattr(NcclGroup, name)

        def call(group: NcclGroup, values: Any, *dtype: str, name: str = name, of: Any = of) -> None:
            sizes = len(values) if name == "all_reduce" else [len(chunk) for chunk in values]
            calls.append(" ".join([name, *dtype, str(sizes)]))
            of(group, values, *dtype)

        monkeypatch.setattr(NcclGroup, name, call)
    return calls


@pytest.mark.parametrize(
    ("dtype", "numel", "verb", "calls"),
    [
        ("float32", 5, ALL_REDUCE, ["all_reduce float32 20"]),
        ("float64", 5, ALL_REDUCE, ["all_reduce float64 40"]),
        ("float16", 5, ALL_REDUCE, ["all_reduce float32 20"]),
        ("bfloat16", 5, REDUCE_SCATTER, ["reduce_scatter float32 [8, 12]"]),
        ("uint8", 5, REDUCE_SCATTER, ["reduce_scatter uint8 [2, 3]"]),
        ("bfloat16", 6, ALL_GATHER, ["all_gather [6, 6]"]),
        ("float32", 1, REDUCE_SCATTER, ["all_reduce float32 4"]),
        ("float32", 1, ALL_GATHER, []),
    ],
)
def test_what_the_group_is_asked_for(
    opened: Opened, dtype: str, numel: int, verb: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transports, failures = opened
    asked = watch(monkeypatch)
    done = [Done(), Done()]
    for rank, transport in enumerate(transports):
        memory = on_device(rank, np.zeros(numel * ITEMSIZE[dtype], np.uint8))
        transport.start(make_task(dtype, numel, memory, verb), done[rank])
    assert all(each.told.wait(60) for each in done)
    assert asked == calls * 2
    assert failures == []


def test_sixteen_bits_are_summed_in_float32_one_task_after_the_other(opened: Opened, gpu: SimulatedDevice) -> None:
    """Tasks use the same memory for that, and larger ones more. 1/2048 and 1 are lost beside one another in float16."""
    transports, _ = opened
    memory: list[list[Any]] = [[], []]
    done = []
    for turn, numel in enumerate((3, 1, 700, 5)):
        for rank, transport in enumerate(transports):
            memory[rank].append(on_device(rank, np.full(numel, 2048 + 2 * turn if rank else 1, np.float16)))
            done.append(Done())
            transport.start(make_task("float16", numel, memory[rank][turn], sequence=turn), done[-1])
    assert all(each.told.wait(60) for each in done)
    run = [seen(gpu, each, "float16") for each in memory[0]]
    assert [set(values) for values in run] == [{float(np.float16((2049 + 2 * turn) / 2))} for turn in range(4)]


def test_ranks_that_launch_in_different_orders_mix_up_their_data(cupy: Any, gpu: SimulatedDevice) -> None:
    """Which is why the order is agreed on. It shows that the stand-in would show it."""
    groups = run_world(2, lambda rank: NcclGroup(open_device(f"cuda:{rank}"), rank, 2, bytes(128)))
    memory = [[on_device(rank, np.full(4, value, np.float32)) for value in (1.0, 10.0)] for rank in range(2)]
    for rank, group in enumerate(groups):
        for each in memory[rank] if rank else reversed(memory[rank]):
            group.all_reduce(each, "float32")
    for group in groups:
        group.stream.synchronize()
        group.close()
    assert [seen(gpu, each, "float32")[0] for each in memory[0]] == [11.0, 11.0]  # and not 2 and 20


def test_a_task_out_of_order_is_refused_by_name(opened: Opened) -> None:
    transports, _ = opened
    transports[0].start(make_task("float32", 2, on_device(0, np.zeros(8, np.uint8))), Done())
    with pytest.raises(OrderMismatch) as raised:
        transports[0].start(make_task("float32", 2, on_device(0, np.zeros(8, np.uint8)), sequence=2), Done())
    assert str(raised.value) == (
        "rank 0 was asked to all_reduce tensor 'weight' of step 7 at place 2 of channel 0, but place 1 is next (after 0: "
        "all_reduce tensor 'weight' of step 7)"
    )


@pytest.mark.parametrize(
    ("make_data", "reason"),
    [
        (lambda: memoryview(bytearray(8)), "a memoryview is no memory of cuda:0"),
        (lambda: on_device(1, np.zeros(8, np.uint8)), "the memory is on cuda:1, not on cuda:0"),
    ],
)
def test_memory_of_another_place_is_refused_by_name(opened: Opened, make_data: Callable[[], Any], reason: str) -> None:
    transports, _ = opened
    with pytest.raises(TransportError) as raised:
        transports[0].start(make_task("float32", 2, make_data()), Done())
    assert str(raised.value) == f"rank 0 cannot all_reduce tensor 'weight' of step 7: {reason}"


def first_failure(opened: Opened) -> tuple[CommschedError, Done]:
    """What is told of rank 1's first task, which rank 0 never starts."""
    transports, failures = opened
    done = Done()
    transports[1].start(make_task("float32", 2, on_device(1, np.zeros(8, np.uint8))), done)
    assert transports[1].told.wait(60)
    return failures[0], done


def test_a_connection_that_breaks_ends_what_waits_for_it(opened: Opened, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL does not say so by itself; it has to be asked."""
    monkeypatch.setattr("commsched.transports.backends.nccl.group._ASK_SECONDS", 0.01)
    cupy.cuda.nccl.fail(6)
    error, done = first_failure(opened)
    assert isinstance(error, PeerLost)
    assert str(error) == (
        "rank 1 lost contact with another rank while it tried to all_reduce tensor 'weight' of step 7: NCCL reports "
        "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error"
    )
    assert done.tasks == []


def test_a_device_that_fails_is_told(opened: Opened, gpu: SimulatedDevice) -> None:
    memory, (transports, failures) = on_device(1, np.zeros(8, np.uint8)), opened
    transports[1].start(make_task("float32", 2, memory), Done())
    gpu.fail(RuntimeError("an illegal memory access"))
    assert transports[1].told.wait(60)
    assert type(failures[0]) is TransportError
    assert str(failures[0]) == "rank 1 failed to all_reduce tensor 'weight' of step 7: CUDARuntimeError: error 700"


def test_a_launch_that_raises_is_told(opened: Opened, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise cupy.cuda.nccl.NcclError(5)

    monkeypatch.setattr(cupy.cuda.nccl.NcclCommunicator, "allReduce", refuse)
    error, done = first_failure(opened)
    assert type(error) is TransportError
    said = "NcclError: NCCL_ERROR_INVALID_USAGE: invalid usage"
    assert str(error) == f"rank 1 failed to all_reduce tensor 'weight' of step 7: {said}"
    assert done.tasks == []


def how_it_ends(monkeypatch: pytest.MonkeyPatch, cupy: Any) -> list[str]:
    ends: list[str] = []
    for name in ("destroy", "abort"):
        of = getattr(cupy.cuda.nccl.NcclCommunicator, name)

        def end(communicator: Any, name: str = name, of: Any = of) -> None:
            ends.append(name)
            of(communicator)

        monkeypatch.setattr(cupy.cuda.nccl.NcclCommunicator, name, end)
    return ends


@pytest.mark.parametrize(("graceful", "outstanding", "ends"), [(True, 0, "destroy"), (False, 0, "abort"), (True, 1, "abort")])
def test_close_aborts_unless_it_is_graceful_and_nothing_is_outstanding(
    graceful: bool, outstanding: int, ends: str, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened_world(2) as (transports, failures):
        ended = how_it_ends(monkeypatch, cupy)
        done = Done()
        for _ in range(outstanding):  # rank 0 never takes part
            transports[1].start(make_task("float32", 2, on_device(1, np.zeros(8, np.uint8))), done)
        for _ in range(2):
            transports[1].close(graceful)
        assert ended == [ends]
        assert done.tasks == []
        assert failures == []
        with pytest.raises(ClosedError, match="this transport is closed"):
            transports[1].start(make_task("float32", 2, on_device(1, np.zeros(8, np.uint8)), sequence=outstanding), done)
        transports[0].close()
    assert not [thread for thread in threading.enumerate() if thread.name == "commsched-nccl"]


def test_an_abort_ends_a_call_that_waits_for_other_ranks(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may connect at the first call. A lock that the abort waited for would keep both for ever."""
    monkeypatch.setattr("commsched.transports.backends.nccl.group._CALL_SECONDS", 0.01)
    [group] = run_world(1, lambda rank: NcclGroup(open_device("cuda:0"), 0, 1, bytes(128)))
    begun, aborted = threading.Event(), threading.Event()

    def connect(*arguments: Any) -> None:
        begun.set()
        assert aborted.wait(60)

    communicator = cupy.cuda.nccl.NcclCommunicator
    monkeypatch.setattr(communicator, "allReduce", connect)
    monkeypatch.setattr(communicator, "abort", lambda communicator: aborted.set())
    memory = on_device(0, np.zeros(8, np.uint8))
    calling = threading.Thread(target=group.all_reduce, args=(memory, "float32"), daemon=True)
    calling.start()
    assert begun.wait(60)
    group.abort()
    calling.join(60)
    assert not calling.is_alive()
    with pytest.raises(RuntimeError, match="it was aborted"):
        group.all_reduce(memory, "float32")
