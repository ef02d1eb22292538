"""What a hierarchy does beyond what every transport does."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from commsched.core.interfaces import Completion, ForwardingTransport, Transport
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.norms import NormsOf
from commsched.core.plan import cut
from commsched.core.scheduler import LAST_KEY
from commsched.core.task import CommTask
from commsched.session.local import local_sessions
from commsched.testing.world import run_world
from commsched.transports.averaging.reduce import narrow, widen
from commsched.transports.backend import TransportContext
from commsched.transports.hierarchy import open_hierarchy
from commsched.transports.open import open_named
from tests.recording_transport import RecordingTransport

from ..worlds import close_together
from .worlds import HostOf, LocalNetwork, OpenNetwork, contexts, open_all


def three_and_the_rest(rank: int) -> int:
    return rank // 3


class Waiting:
    """A Completion whose tasks can be waited for."""

    def __init__(self, count: int) -> None:
        self._done = threading.Semaphore(0)
        self._count = count

    def on_sent(self, task: CommTask) -> None: ...

    def on_done(self, task: CommTask) -> None:
        self._done.release()

    def wait(self) -> None:
        for _ in range(self._count):
            assert self._done.acquire(timeout=60)


@contextmanager
def opened(host_of: HostOf, size: int, network: OpenNetwork = LocalNetwork) -> Iterator[Sequence[Transport]]:
    transports = open_all(host_of, network, [pytest.fail] * size)
    try:
        yield transports
    finally:
        close_together(transports)


def average(
    transports: Sequence[Transport], group: int, manifest: Manifest, inputs: Sequence[bytes], step: int = 0
) -> list[bytes]:
    """What each rank gets for its input, in one partition; every rank has added the group."""
    buffers = [bytearray(each) for each in inputs]
    [at] = cut(manifest, 2**30).partitions

    def rank(number: int) -> None:
        waiting = Waiting(1)
        transports[number].start(CommTask(group, step, at, memoryview(buffers[number])), waiting)
        waiting.wait()

    run_world(len(transports), rank)
    return [bytes(buffer) for buffer in buffers]


def add_group(transports: Sequence[Transport], group: int, manifest: Manifest) -> None:
    for transport in transports:
        transport.add_group(group, manifest)


def one(dtype: str, numel: int) -> Manifest:
    return Manifest((TensorSpec("x", (numel,), dtype),))


def test_16_bit_sums_travel_as_float32_and_are_rounded_once_over_hosts_of_different_sizes() -> None:
    inputs = [np.random.default_rng(rank).normal(size=1001).astype(np.float16) for rank in range(5)]
    first = inputs[0].astype(np.float32) + inputs[1].astype(np.float32) + inputs[2].astype(np.float32)
    second = inputs[3].astype(np.float32) + inputs[4].astype(np.float32)
    expected = ((first + second) / np.float32(5)).astype(np.float16)
    with opened(three_and_the_rest, 5) as transports:
        add_group(transports, 0, one("float16", 1001))
        results = average(transports, 0, one("float16", 1001), [each.tobytes() for each in inputs])
    assert set(results) == {expected.tobytes()}


class HeldUp(RecordingTransport):
    """A network whose first start lasts until ``go``."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context.world.rank, context.world.world_size)
        self.go, self.began = threading.Event(), threading.Event()

    def start(self, task: CommTask, completion: Completion) -> None:
        if not self.began.is_set():
            self.began.set()
            assert self.go.wait(60)
        super().start(task, completion)


def test_sums_that_wait_go_to_the_network_in_the_order_of_their_tasks() -> None:
    networks: dict[int, HeldUp] = {}

    def open_network(context: TransportContext) -> Transport:
        return networks.setdefault(context.world.rank, HeldUp(context))

    manifest = one("float32", 30)
    partitions = cut(manifest, 40).partitions
    tasks = [CommTask(0, 0, at, memoryview(bytearray(at.nbytes))) for at in partitions]
    for task, order in zip(tasks, (0, 2, 1)):
        task.order = order
    with opened(lambda rank: rank, 2, lambda: open_network) as transports:
        transports[0].add_group(0, manifest)
        transports[0].start(tasks[0], Waiting(0))
        assert networks[0].began.wait(60)
        for task in tasks[1:]:
            transports[0].start(task, Waiting(0))
        networks[0].go.set()
        started = networks[0].wait_started(3, 60)
    assert [task.partition.index for task in started] == [0, 2, 1]


class Measuring(HeldUp):
    """A network that tells norms, in one row."""

    def norm_rows(self, manifest: Manifest) -> int:
        return 1


def test_rows_of_norms_follow_the_sums_that_they_are_about() -> None:
    networks: dict[int, Measuring] = {}

    def open_network(context: TransportContext) -> Transport:
        return networks.setdefault(context.world.rank, Measuring(context))

    manifest = one("float32", 30)
    rows = Manifest((TensorSpec("row", (3,), "float64"),), norms=NormsOf(0, 0, (2.0,)))
    with opened(lambda rank: rank, 2, lambda: open_network) as transports:
        leader, network = transports[0], networks[0]
        assert (leader.norm_rows(manifest), leader.norm_rows(one("bfloat16", 30))) == (1, 0)
        leader.add_group(0, manifest)
        leader.add_group(1, rows)
        tasks = [CommTask(0, 0, at, memoryview(bytearray(at.nbytes))) for at in cut(manifest, 40).partitions]
        for order, task in enumerate(tasks):
            task.order = order
            leader.start(task, Waiting(0))
        [at] = cut(rows, 40).partitions
        row = CommTask(1, 0, at, memoryview(bytearray(at.nbytes)), order=LAST_KEY, priority=0)
        leader.start(row, Waiting(0))
        network.go.set()
        started = network.wait_started(4, 60)
        assert [(task.group, task.order) for task in started] == [(0, 0), (0, 1), (0, 2), (1, LAST_KEY)]


def test_a_network_without_norms_and_a_host_alone_have_none() -> None:
    for host_of, size in ((lambda rank: rank, 2), (lambda rank: 0, 2)):
        with opened(host_of, size, lambda: lambda context: RecordingTransport(context.world.rank, 2)) as transports:
            assert [transport.norm_rows(one("float32", 3)) for transport in transports] == [0, 0]


def test_members_tell_the_norms_that_their_leader_tells() -> None:
    with opened(three_and_the_rest, 5) as transports:
        assert {transport.norm_rows(one("float32", 3)) for transport in transports} == {1}
        assert {transport.norm_rows(one("float16", 3)) for transport in transports} == {0}


def shared_memories() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:commsched")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_ends_with_its_group_and_all_of_it_with_close() -> None:
    before, files = shared_memories(), open_files()
    with opened(three_and_the_rest, 5) as transports:
        add_group(transports, 0, one("float32", 1000))
        average(transports, 0, one("float32", 1000), [bytes(4000)] * 5)
        lasting = shared_memories()
        assert lasting > before
        manifest = one("uint8", 70)
        data = bytes(range(70))
        for group in range(1, 60):
            add_group(transports, group, manifest)
            for step in range(2):
                inputs = [data if rank == 4 else bytes(len(data)) for rank in range(5)]
                assert set(average(transports, group, manifest, inputs, step)) == {data}
            for transport in transports:
                transport.release(group)
        # A thread may still be returning from the last of them.
        assert shared_memories() <= lasting + 8
        assert open_files() < files + 40
        average(transports, 0, one("float32", 1000), [bytes(4000)] * 5, 1)
    del transports
    assert shared_memories() == before
    assert open_files() == files


def test_a_group_that_its_leader_releases_before_a_member_announces_it_is_forgotten() -> None:
    with opened(three_and_the_rest, 2) as (leader, member):
        for group in range(20):
            leader.add_group(group, one("uint8", 70))
            leader.release(group)
            member.add_group(group, one("uint8", 70))
            member.release(group)
        add_group([leader, member], 20, one("uint8", 70))
        average([leader, member], 20, one("uint8", 70), [bytes(70)] * 2)
        [connection] = leader._members
        assert list(connection._manifests) == [20]


def test_many_broadcasts_of_a_job_need_few_descriptors() -> None:
    """Whoever makes a broadcast releases its group, and the transport hears of it."""
    everybodys = contexts(three_and_the_rest, [pytest.fail] * 4)
    network = LocalNetwork()
    sessions = local_sessions(4, open_transport=lambda rank, control: open_hierarchy(everybodys[rank], network))
    opened_files = []

    def rank(number: int) -> None:
        session = sessions[number]
        for count in range(60):
            data = bytearray([count] * 50 if number == 3 else 50)
            session.broadcast(f"flag {count}", memoryview(data), root=3)
            assert data == bytes([count] * 50)
            if count in (5, 59):
                session.gather("here")  # nobody is ahead
                opened_files.append(open_files())
        session.close()

    run_world(4, rank)
    assert max(opened_files) - min(opened_files) < 20


#: By the network of the first host: partition, channel, sequence and order of each task.
Start = tuple[int, int, int, int]


class Ordered(ForwardingTransport):
    """A network that must be started in order, and keeps in which it was."""

    def __init__(self, inner: Transport, started: list[Start]) -> None:
        super().__init__(inner)
        self.ordered, self.channels = True, 2
        self._started = started

    def start(self, task: CommTask, completion: Completion) -> None:
        self._started.append((task.partition.index, task.channel, task.sequence, task.order))
        self._inner.start(task, completion)


def test_an_ordered_network_is_started_in_the_order_of_the_leader_and_members_know_that_it_is_ordered() -> None:
    started: list[list[Start]] = [[], []]

    def open_network() -> Callable[[TransportContext], Transport]:
        network = LocalNetwork()
        return lambda context: Ordered(network(context), started[context.world.rank])

    manifest = Manifest(tuple(TensorSpec(f"t{i}", (250,), "float32") for i in range(6)))
    partitions = cut(manifest, 1000).partitions
    agreed = [3, 0, 5, 1, 4, 2]
    with opened(three_and_the_rest, 4, open_network) as transports:
        assert {(transport.ordered, transport.channels) for transport in transports} == {(True, 2)}
        add_group(transports, 0, manifest)

        def rank(number: int) -> None:
            waiting = Waiting(6)
            order = agreed if number in (0, 3) else agreed[::-1]  # a member's copies may come in any order
            for index in order:
                task = CommTask(0, 0, partitions[index], memoryview(bytearray(1000)))
                task.sequence, task.order = agreed.index(index), 10 * index
                transports[number].start(task, waiting)
            waiting.wait()

        run_world(4, rank)
    assert started == [[(index, 0, place, 10 * index) for place, index in enumerate(agreed)]] * 2


def test_what_is_collected_is_reported_when_all_have_contributed_and_launched_when_it_is_started() -> None:
    started: list[list[Start]] = [[], []]

    def open_network() -> Callable[[TransportContext], Transport]:
        network = LocalNetwork()
        return lambda context: Ordered(network(context), started[context.world.rank])

    manifest = Manifest(tuple(TensorSpec(f"t{i}", (250,), "float32") for i in range(6)))
    partitions = cut(manifest, 1000).partitions
    agreed = [3, 0, 5, 1, 4, 2]
    with opened(three_and_the_rest, 5, open_network) as transports:
        assert {transport.leaders for transport in transports} == {(0, 0, 0, 3, 3)}
        add_group(transports, 0, manifest)
        tasks = [[CommTask(0, 0, at, memoryview(bytearray(1000))) for at in partitions] for _ in transports]
        waiting = [Waiting(6) for _ in transports]
        reported: list[SimpleQueue[int]] = [SimpleQueue() for _ in transports]

        def collected(rank: int) -> Callable[[Sequence[CommTask]], None]:
            return lambda tasks: [reported[rank].put(task.partition.index) for task in tasks]  # type: ignore[func-returns-value]

        for leader in (0, 3):
            for task in tasks[leader]:
                transports[leader].collect(task, collected(leader))
        for member in (1, 4):
            for task in reversed(tasks[member]):
                transports[member].start(task, waiting[member])
        assert [reported[3].get(timeout=60) for _ in range(6)] == [5, 4, 3, 2, 1, 0]
        assert reported[0].empty()  # rank 2 has contributed nothing yet
        for task in tasks[2]:
            transports[2].start(task, waiting[2])
        # Which of its two members is the last to contribute a partition is not decided: each has a connection of its own.
        assert sorted(reported[0].get(timeout=60) for _ in range(6)) == [0, 1, 2, 3, 4, 5]
        assert started == [[], []]
        for leader in (0, 3):
            for place, index in enumerate(agreed):
                tasks[leader][index].sequence = place
                transports[leader].start(tasks[leader][index], waiting[leader])
        for each in waiting:
            each.wait()
    assert [[index for index, *_ in each] for each in started] == [agreed] * 2


# --- opening by name ---


def round_to(dtype: str, values: Any) -> np.ndarray:
    """float32 values as they are after having been a 16-bit type."""
    source = np.asarray(values, np.float32)
    narrowed, back = bytearray(2 * source.size), np.empty(source.size, np.float32)
    narrow(source.data, dtype, narrowed)
    widen(narrowed, dtype, back.data)
    return back


def narrowed(dtype: str, values: np.ndarray) -> bytes:
    out = bytearray(2 * values.size)
    narrow(values.data, dtype, out)
    return bytes(out)


def example(dtype: str, drawn: np.ndarray, wire: str) -> tuple[list[bytes], bytes]:
    """Of values by rank: the bytes of each, and those of their average over a host of three ranks and one of one."""
    if dtype in ("bfloat16", "float16"):
        ranks = [round_to(dtype, each) for each in drawn]
        return [narrowed(dtype, each) for each in ranks], narrowed(dtype, sum(ranks) / np.float32(4))
    if dtype == "uint8":
        drawn *= 40
    ranks = [each.astype(dtype) for each in drawn.astype(np.int64 if dtype == "uint8" else np.float64)]
    hosts = [ranks[0] + ranks[1] + ranks[2], ranks[3]]
    if dtype == "float32" and wire != "none":
        first, second = (round_to(wire, each) for each in hosts)
        mean = round_to(wire, (first + second) / np.float32(4))
    else:
        mean = hosts[0] + hosts[1]
        if dtype != "uint8":  # whose sums move bytes
            mean /= mean.dtype.type(4)
    return [each.tobytes() for each in ranks], mean.tobytes()


@pytest.mark.parametrize("network", ["ps", "gloo"])
@pytest.mark.parametrize("wire", ["none", "bfloat16", "float16"])
def test_only_what_was_float32_travels_as_the_wire_dtype_and_all_is_exact(network: str, wire: str) -> None:
    """Of one group, its dtypes mixed: sums of a host's 16-bit tensors are float32 and lie beside narrowed ones."""
    if network == "gloo":
        pytest.importorskip("torch.distributed")
    dtypes = ["bfloat16", "float32", "float16", "float64", "bfloat16", "float32", "uint8", "float16"]
    manifest = Manifest(tuple(TensorSpec(f"t{i}", (301 + i,), dtype) for i, dtype in enumerate(dtypes)))
    random = np.random.default_rng(7)
    encoded, expected = [], []  # by tensor: what each rank has, and what all get
    for index, (dtype, spec) in enumerate(zip(dtypes, manifest.tensors)):
        drawn = random.normal(size=(4, *spec.shape))
        if dtype == "bfloat16":  # more than a float16 can hold, and less than it can tell from 0
            drawn *= 1e5 if index == 0 else 1e-9
        of_ranks, mean = example(dtype, drawn, wire)
        encoded.append(of_ranks)
        expected.append(mean)

    everybodys = contexts(three_and_the_rest, [pytest.fail] * 4, wire=wire)
    transports = run_world(4, lambda rank: open_named(everybodys[rank], network))
    add_group(transports, 0, manifest)
    partitions = cut(manifest, 500).partitions
    buffers = [{dtype: bytearray(nbytes) for dtype, nbytes in manifest.buffer_bytes.items()} for _ in range(4)]
    places = [(dtype, manifest.offset(index), len(expected[index])) for index, dtype in enumerate(dtypes)]
    for index, (dtype, offset, nbytes) in enumerate(places):
        for rank in range(4):
            buffers[rank][dtype][offset : offset + nbytes] = encoded[index][rank]

    def rank(number: int) -> None:
        waiting = Waiting(len(partitions))
        for sequence, at in enumerate(partitions):
            task = CommTask(0, 0, at, memoryview(buffers[number][at.dtype])[at.start : at.stop])
            task.sequence = sequence
            transports[number].start(task, waiting)
        waiting.wait()

    run_world(4, rank)
    for buffer in buffers:
        for index, (dtype, offset, nbytes) in enumerate(places):
            assert buffer[dtype][offset : offset + nbytes] == expected[index], f"{manifest.tensors[index]}"
    close_together(transports)


def test_a_host_whose_sum_a_float16_cannot_hold_gets_infinity_as_documented() -> None:
    everybodys = contexts(three_and_the_rest, [pytest.fail] * 4, wire="float16")
    transports = run_world(4, lambda rank: open_named(everybodys[rank], "ps"))
    add_group(transports, 0, one("float32", 2))
    results = average(transports, 0, one("float32", 2), [np.array([30_000, 20_000], np.float32).tobytes()] * 4)
    assert set(results) == {np.array([np.inf, 20_000], np.float32).tobytes()}
    close_together(transports)


def test_without_a_hierarchy_the_wire_is_around_the_network() -> None:
    everybodys = contexts(three_and_the_rest, [pytest.fail] * 2, wire="bfloat16", hierarchy="off")
    transports = run_world(2, lambda rank: open_named(everybodys[rank], "ps"))
    add_group(transports, 0, one("float32", 2))
    inputs = [np.array([1 + 2**-8, 3], np.float32).tobytes(), np.array([1, 5], np.float32).tobytes()]
    assert set(average(transports, 0, one("float32", 2), inputs)) == {np.array([1, 4], np.float32).tobytes()}
    close_together(transports)
