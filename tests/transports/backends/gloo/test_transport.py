"""The transport over gloo, with ranks that are threads."""

from __future__ import annotations

import gc
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

pytest.importorskip("torch.distributed")

from torch.distributed import ProcessGroupGloo, Store

from commsched.core.errors import CommschedError, ConfigError, PeerLost, PeerTimeout, TransportError
from commsched.core.interfaces import OnFailure, Transport
from commsched.core.manifest import ITEMSIZE, Manifest, TensorSpec
from commsched.core.order.messages import LARGEST
from commsched.core.plan import cut
from commsched.core.task import ALL_REDUCE, REDUCE_SCATTER, CommTask
from commsched.testing.check_transport import (
    check_back_to_back,
    check_random_rounds,
    check_transport,
)
from commsched.testing.checked_world import Meeting, Threads
from commsched.testing.world import run_world
from commsched.transports.backends.gloo import open_transport
from commsched.transports.backends.gloo.channel import GlooChannel
from commsched.transports.backends.gloo.meeting import _listening
from commsched.transports.collective.failures import DeferredFailure
from tests.jobs.job import clean_environ
from tests.transports.worlds import gloo_world


def test_conformance() -> None:
    check_transport(gloo_world, world_sizes=(1, 2, 3), rounds=20)


def test_the_check_finds_an_all_reduce_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small worlds exchange instead, so nothing else in the check would call it."""
    monkeypatch.setattr(GlooChannel, "all_reduce", lambda self, data, dtype, done: done(None))
    with pytest.raises(AssertionError, match="got a wrong average of"):
        check_transport(gloo_world, world_sizes=(2,), rounds=10)


def test_strangers_are_taken_no_more_once_all_ranks_are_connected() -> None:
    """gloo keeps the descriptor of each."""
    before = set(_listening())
    with socket.create_server(("127.0.0.1", 0)) as other, Threads(gloo_world, 2) as world:
        ports = [socket_of(inode, descriptor) for inode, descriptor in _listening().items() if inode not in before]
        assert len(ports) == 3
        for port in ports:
            if port == other.getsockname()[1]:
                socket.create_connection(("127.0.0.1", port), timeout=60).close()
            else:
                with pytest.raises(TimeoutError):
                    socket.create_connection(("127.0.0.1", port), timeout=0.3)
        del world


def socket_of(inode: int, descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as listening:
        port: int = listening.getsockname()[1]
        return port


@pytest.mark.parametrize(("world_size", "rounds", "collective"), [(2, 40, "all_reduce"), (3, 20, "rsag")])
def test_random_rounds_end_and_are_exact(world_size: int, rounds: int, collective: str) -> None:
    check_random_rounds(lambda: Threads(gloo_world, world_size), rounds, collective)


def test_back_to_back_rounds_of_three_ranks() -> None:
    check_back_to_back(lambda: Threads(gloo_world, 3), 200)


class Waiting:
    def __init__(self) -> None:
        self.done = threading.Event()

    def on_sent(self, task: CommTask) -> None: ...

    def on_done(self, task: CommTask) -> None:
        self.done.set()


def begin(transport: Transport, verb: str, dtype: str) -> list[Waiting]:
    """Tasks that go nowhere unless the other ranks start them too."""
    manifest = Manifest((TensorSpec("weight", (300_000,), dtype),))
    transport.add_group(0, manifest)
    waiting = []
    for index, partition in enumerate(cut(manifest, 100_000).partitions):
        task = CommTask(0, 3, partition, memoryview(bytearray(partition.nbytes)))
        task.verb, task.channel, task.sequence = verb, index % 2, index // 2
        waiting.append(Waiting())
        transport.start(task, waiting[-1])
    return waiting


@pytest.mark.parametrize("graceful", [True, False])
@pytest.mark.parametrize(("verb", "dtype"), [(ALL_REDUCE, "float32"), (ALL_REDUCE, "float16"), (REDUCE_SCATTER, "float64")])
def test_a_rank_that_closes_with_operations_under_way_ends_and_is_noticed(
    verb: str, dtype: str, graceful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeferredFailure.__init__, "__defaults__", (0.01,))
    monkeypatch.setattr("commsched.transports.backends.gloo._patience_seconds", lambda context: 1.0)
    monkeypatch.setattr("commsched.transports.backends.gloo._STATIC_PATIENCE_SECONDS", 1.0)
    failures: list[CommschedError] = []
    failed = threading.Event()
    before = set(threading.enumerate())

    def on_failure(error: CommschedError) -> None:
        failures.append(error)
        failed.set()

    with gloo_world([on_failure] * 3) as transports:
        waiting = begin(transports[0], verb, dtype) + begin(transports[1], verb, dtype)
        run_world(1, lambda _: transports[0].close(graceful))  # it ends
        assert failed.wait(60)
        assert isinstance(failures[0], PeerLost)
        assert f"rank 1 lost contact with another rank while it tried to {verb} tensor 'weight' of step 3: " in str(failures[0])
        transports[1].close(graceful)
    assert not any(each.done.is_set() for each in waiting)
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("commsched"):  # its operation ends in its time limit
            thread.join(60)
            assert not thread.is_alive(), thread.name


def test_a_rank_may_be_late_in_a_static_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """By more than gloo waits for what all are ready for: it validates, say, while the others have launched already."""
    monkeypatch.setattr("commsched.transports.backends.gloo._patience_seconds", lambda context: 0.2)
    manifest = Manifest((TensorSpec("weight", (1000,), "float32"),))
    with gloo_world([pytest.fail] * 2, order="static") as transports:
        waiting = []
        for rank, transport in enumerate(transports):
            transport.add_group(0, manifest)
            task = CommTask(0, 0, cut(manifest, 1 << 20).partitions[0], memoryview(bytearray(4000)))
            task.channel, task.sequence = LARGEST, 0
            waiting.append(Waiting())
            if rank == 1:
                assert not waiting[0].done.wait(0.5)
            transport.start(task, waiting[-1])
        assert all(each.done.wait(60) for each in waiting)


def test_memory_that_was_given_away_is_let_go_of() -> None:
    """gloo knows it by its address alone: it is kept until the operation ends, and no longer."""
    memory: list[weakref.ref[np.ndarray]] = []
    manifest = Manifest(tuple(TensorSpec(dtype, (1000,), dtype) for dtype in ITEMSIZE))

    def average(transport: Transport) -> None:
        transport.add_group(0, manifest)
        for sequence, partition in enumerate(cut(manifest, 1 << 20).partitions):
            array = np.zeros(partition.nbytes, np.uint8)
            memory.append(weakref.ref(array))
            task = CommTask(0, 0, partition, array.data)
            task.sequence = sequence
            waiting = Waiting()
            transport.start(task, waiting)
            del array
            assert memory[-1]() is not None or waiting.done.is_set()
            assert waiting.done.wait(60)

    with gloo_world([pytest.fail] * 2) as transports:
        run_world(2, lambda rank: average(transports[rank]))
    gc.collect()
    assert [each() for each in memory] == [None] * 2 * len(ITEMSIZE)


class AddressOnly(Store):
    """Takes a process group's address, and tells it no other."""

    def __init__(self) -> None:
        super().__init__()
        self.record: dict[str, str] = {}

    def set(self, key: str, value: bytes) -> None:
        self.record[key] = value.hex()

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        raise InterruptedError


def test_a_rank_that_does_not_connect_is_an_error_and_no_wait() -> None:
    """It has said where it is, and then it is gone."""
    meeting = Meeting(2)

    def open_rank(rank: int) -> str:
        context = meeting.context(rank, pytest.fail, fail_after=1.0)
        if rank == 1:
            store = AddressOnly()
            with pytest.raises(InterruptedError):
                ProcessGroupGloo(store, 1, 2, timedelta(seconds=1))
            context.gather(store.record)
            context.gather([""] * len(store.record))
            return ""
        with pytest.raises(PeerTimeout) as caught:
            open_transport(context)
        return str(caught.value)

    message, _ = run_world(2, open_rank)
    assert message.startswith("rank 0 at 127.0.0.1 cannot reach all ranks over gloo: ")


def test_a_failure_of_the_job_is_raised_at_once_while_ranks_connect() -> None:
    """gloo itself waits for the lost rank."""
    meeting = Meeting(2)
    callbacks: queue.SimpleQueue[OnFailure] = queue.SimpleQueue()

    def open_rank(rank: int) -> None:
        context = replace(meeting.context(rank, pytest.fail, fail_after=3.0), when_failed=callbacks.put)
        if rank == 0:
            with pytest.raises(PeerLost, match=r"^rank 1 is gone$"):
                open_transport(context)
            return
        store = AddressOnly()
        with pytest.raises(InterruptedError):
            ProcessGroupGloo(store, 1, 2, timedelta(seconds=1))
        # Before rank 0 knows the address: there gloo would find by itself, sooner or later, that nobody listens.
        callbacks.get(timeout=60.0)(PeerLost("rank 1 is gone"))
        context.gather(store.record)
        context.gather([""] * len(store.record))

    run_world(2, open_rank)


def test_a_host_that_is_not_ours_is_named() -> None:
    context = replace(Meeting(1).context(0, pytest.fail), host="192.0.2.1")
    with pytest.raises(TransportError, match=r"rank 0 at 192\.0\.2\.1 cannot listen there for gloo: "):
        open_transport(context)


def test_without_pytorch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(ConfigError, match=r"transport='gloo' needs PyTorch: pip install torch\Z"):
        open_transport(Meeting(1).context(0, pytest.fail))


def test_without_gloo_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    with pytest.raises(ConfigError, match=r"transport='gloo' needs a PyTorch that was built with gloo: pip install torch\Z"):
        open_transport(Meeting(1).context(0, pytest.fail))


def test_a_default_group_of_another_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    expected = (
        r"torch\.distributed was initialised as rank 1 of 4, but commsched was launched as rank 0 of 1; give both the same"
    )
    with pytest.raises(ConfigError, match=expected):
        open_transport(Meeting(1).context(0, pytest.fail))


def test_the_default_group_stays_the_trainings_own() -> None:
    """Ours are others, so that its collectives may run at any moment."""
    program = """
import torch, torch.distributed as dist, commsched
from tests.transports.worlds import gloo_world
import pytest
from commsched.testing.world import run_world
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with gloo_world([pytest.fail]) as (transport,):
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [1.0] * 3
dist.destroy_process_group()
print("ended")
"""
    ran = subprocess.run([sys.executable, "-c", program], env=clean_environ(), capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, "ended\n"), ran.stderr
