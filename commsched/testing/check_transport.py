"""check_transport: checks what every transport must do. Needs no test framework. A failed check raises AssertionError.

Contributions are small integers whose average over the ranks is also an integer. The expected bits are therefore known
exactly, for every dtype and every rounding. Contributions depend on rank, step and position, so a missing, stale or misplaced
contribution is detected. With ``open_device`` they are in the memory of a device, and no check waits for the device where the
interface says that a stream may.

Ranks are threads of one process (``check_transport``). Where a transport needs it, ranks are processes of a real job, and each
process calls ``check_job``.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.core import Core
from ..core.device import Device, DeviceStream
from ..core.device_events import Event
from ..core.errors import PeerLost
from ..core.interfaces import Buffer, TaskObserver, Transport
from ..core.manifest import ITEMSIZE, Manifest, TensorSpec
from ..core.norms import ROW_DTYPE
from ..core.order.static import STABLE_STEPS
from ..core.scheduler import COLLECTIVES, SchedulerConfig
from ..session.norms import Norms, rows_for
from .checked_world import CheckedJob, CheckedWorld, OpenDevice, OpenRanks, OpenSession, OpenWorld, Threads
from .world import run_world

_ONE_AT_A_TIME = 1  # credit in bytes that allows a single partition in flight


def check_transport(
    open_world: OpenWorld,
    *,
    world_sizes: Sequence[int] = (1, 2, 3, 4, 5),
    rounds: int = 200,
    timeout_seconds: float = 60.0,
    open_device: OpenDevice | None = None,
) -> None:
    """Run all checks of this module, with ranks as threads.

    Args:
        open_world: opens the transports to check.
        world_sizes: the world sizes for which results are checked.
        rounds: number of rounds in ``check_random_rounds`` and ``check_back_to_back`` with two ranks. Other world sizes run a
            tenth of them.
        timeout_seconds: limit for the ranks of one check. ``check_close`` has a fixed limit of 30 s.
        open_device: opens the device of a rank, whose memory holds the tensors. ``None`` means the host's memory.

    Raises:
        AssertionError: a result is wrong, or a failure was not reported correctly. Names the check that failed.
        TimeoutError: a rank does not end. Shows its stack.
    """
    for size in world_sizes:
        check_results(partial(Threads, open_world, size, timeout_seconds, open_device), rounds if size == 2 else rounds // 10)
    check_large_tensors(partial(Threads, open_world, 2, timeout_seconds, open_device))
    check_leaver(open_world, timeout_seconds=timeout_seconds, open_device=open_device)
    check_close(open_world)


def check_job(open_session: OpenSession, world_size: int, *, rounds: int = 200, open_device: OpenDevice | None = None) -> None:
    """Run all checks of results, each with its own session. Every rank of a job of ``world_size`` ranks must call it.

    Large tensors are checked with two ranks only, as in ``check_transport``.

    Raises:
        AssertionError: a result is wrong. Names the result.
        CommschedError: the job failed, for example on another rank.
    """
    open_ranks = partial(CheckedJob, open_session, world_size, open_device)
    check_results(open_ranks, rounds)
    if world_size == 2:
        check_large_tensors(open_ranks)


def check_results(open_ranks: OpenRanks, rounds: int) -> None:
    """Run every check in which all ranks do the same."""
    for collective in COLLECTIVES:
        check_averages(open_ranks, collective)
        check_equal_bits(open_ranks, collective)
        check_random_rounds(open_ranks, rounds, collective)
    check_all_reduce(open_ranks, rounds)
    check_opposite_orders(open_ranks)
    check_back_to_back(open_ranks, rounds)
    check_recut(open_ranks)
    check_static_order(open_ranks)
    check_static_order(open_ranks, measures=True)
    check_norms(open_ranks)


def check_all_reduce(open_ranks: OpenRanks, rounds: int) -> None:
    """Averages are exact by the all-reduce of the transport's channels, which small worlds do not use otherwise.

    The check is skipped where there are no channels.
    """

    @contextmanager
    def open_summing() -> Iterator[CheckedWorld]:
        with open_ranks() as world:
            world.use_all_reduce()
            yield world

    with open_ranks() as world:
        sums = world.sums
    if sums:
        check_averages(open_summing)
        check_equal_bits(open_summing)
        check_random_rounds(open_summing, rounds)


def check_averages(open_ranks: OpenRanks, collective: str = "all_reduce") -> None:
    """Averages (sums, for uint8) are exact for every dtype and for odd sizes. Each rank has its own order and delays."""
    manifest = Manifest(
        tuple(TensorSpec(f"{dtype}-{numel}", (numel,), dtype) for numel in (1, 3, 1021, 20_011) for dtype in ITEMSIZE)
    )

    def body(world: CheckedWorld, rank: int) -> None:
        chance = random.Random(rank)
        with world.core(rank, SchedulerConfig(10_007, 30_000, collective=collective)) as core:
            tensors = _Tensors(core, manifest, world, rank)
            for _ in range(4):
                order = list(range(len(manifest.tensors)))
                chance.shuffle(order)
                tensors.average(rank, order, lambda: _pause(chance.random() * 0.001))

    _run(open_ranks, body, collective)


def check_random_rounds(open_ranks: OpenRanks, rounds: int, collective: str = "all_reduce") -> None:
    """The rounds of two groups overlap, and averages are exact.

    Each rank has its own order of readiness and its own delays. One partition may be in flight in the first half, several in
    the second half.
    """
    manifests = [
        Manifest(tuple(TensorSpec(f"{name}{i}", (size + i,), "float32") for i in range(6)))
        for name, size in (("a", 300), ("b", 2))
    ]
    half = rounds // 2

    def body(world: CheckedWorld, rank: int) -> None:
        chance = random.Random(rank)
        with world.core(rank, SchedulerConfig(1200, _ONE_AT_A_TIME, collective=collective)) as core:
            groups = [_Tensors(core, manifest, world, rank) for manifest in manifests]
            for round in range(rounds):
                if round == half:
                    several = SchedulerConfig(1200, 3000, collective=collective)
                    core.switch_at(several, {tensors.group.index: half for tensors in groups})
                for tensors in groups:
                    order = list(range(6))
                    chance.shuffle(order)
                    tensors.begin(rank, order, lambda: _pause(0.0003) if chance.random() < 0.02 else None)
                for tensors in groups:
                    tensors.compare(rank)

    _run(open_ranks, body, collective)


def check_large_tensors(open_ranks: OpenRanks) -> None:
    """Averages of 16 MB tensors are exact for every floating dtype: two dtypes in one partition, two in several.

    That is more than gRPC accepts in one message by default (4 MB), or a socket holds (6 MB on Linux).
    """
    for dtype, partition_bytes in (("float16", 2**27), ("bfloat16", 5 * 10**6), ("float32", 2**27), ("float64", 4 * 10**6)):
        numel = 16_000_000 // ITEMSIZE[dtype] + 1
        manifest = Manifest((TensorSpec("large", (numel,), dtype),))

        def body(world: CheckedWorld, rank: int, manifest: Manifest = manifest, partition_bytes: int = partition_bytes) -> None:
            with world.core(rank, SchedulerConfig(partition_bytes=partition_bytes)) as core:
                _Tensors(core, manifest, world, rank).average(rank, range(1))

        _run(open_ranks, body)


def check_equal_bits(open_ranks: OpenRanks, collective: str = "all_reduce") -> None:
    """For numbers whose average must be rounded, every rank gets the same bits, close to the true average."""
    manifest = Manifest((TensorSpec("x", (50_021,), "float32"), TensorSpec("y", (50_021,), "bfloat16")))

    def inputs(rank: int) -> NDArray[np.float32]:
        values = np.random.default_rng(rank).normal(size=(2, 50_021)).astype(np.float32)
        return values.view(np.uint32).__and__(0xFFFF0000).view(np.float32)  # bfloat16 holds them

    def body(world: CheckedWorld, rank: int) -> None:
        with world.core(rank, SchedulerConfig(30_000, collective=collective)) as core:
            tensors = _Tensors(core, manifest, world, rank)
            tensors.begin_step()
            for tensor, spec in enumerate(manifest.tensors):
                tensors.submit(tensor, _to_bytes(inputs(rank)[tensor], spec.dtype))
            everybodys = [inputs(rank) for rank in range(world.size)]
            digest = hashlib.sha256()
            for tensor, spec in enumerate(manifest.tensors):
                received = tensors.receive(tensor)
                digest.update(received)
                average = _from_bytes(received, spec.dtype)
                expected = np.mean([values[tensor] for values in everybodys], axis=0, dtype=np.float64)
                tolerance = 2**-8 if spec.dtype == "bfloat16" else 1e-6
                assert np.allclose(average, expected, rtol=tolerance, atol=tolerance), f"'{spec.name}' is far from the average"
            assert len(set(world.gather(rank, digest.hexdigest()))) == 1, "ranks got different bits"

    _run(open_ranks, body, collective)


def check_opposite_orders(open_ranks: OpenRanks) -> None:
    """Ranks that become ready in opposite orders, with one partition in flight, do not deadlock."""
    manifest = Manifest(tuple(TensorSpec(f"layer{i}", (257,), "float32") for i in range(8)))

    def body(world: CheckedWorld, rank: int) -> None:
        with world.core(rank, SchedulerConfig(1028, _ONE_AT_A_TIME, "fifo")) as core:
            tensors = _Tensors(core, manifest, world, rank)
            for _ in range(3):
                tensors.average(rank, range(8) if rank == 0 else range(7, -1, -1))

    _run(open_ranks, body)


def check_back_to_back(open_ranks: OpenRanks, rounds: int) -> None:
    """Rounds of one tensor follow each other without pause, and the last rank is slow. Each round is exact on each rank.

    The next push of a fast rank must never change the average that the slow rank is still receiving.
    """
    manifest = Manifest((TensorSpec("weight", (64,), "float32"),))

    def body(world: CheckedWorld, rank: int) -> None:
        with world.core(rank, SchedulerConfig()) as core:
            tensors = _Tensors(core, manifest, world, rank)
            for step in range(rounds):
                tensors.begin_step()
                mine = np.full(64, step + 2 * rank - (world.size - 1), np.float32).tobytes()
                if rank == world.size - 1 and step % 50 == 0:
                    _pause(0.001)
                tensors.submit(0, mine)
                values = np.frombuffer(tensors.receive(0), np.float32)
                wrong = np.count_nonzero(values != step)
                assert wrong == 0, f"rank {rank} got {wrong} wrong numbers in round {step}, such as {values[values != step][0]}"

    _run(open_ranks, body)


def check_recut(open_ranks: OpenRanks) -> None:
    """The plan of the same tensors changes between steps, so a partition's index may mean another range than before."""
    layers = [(TensorSpec(f"weight{i}", (1000 + i,), "float32"), TensorSpec(f"bias{i}", (5 + i,), "float32")) for i in range(6)]
    manifest = Manifest(tuple(spec for layer in layers for spec in layer))

    def body(world: CheckedWorld, rank: int) -> None:
        with world.core(rank, SchedulerConfig(partition_bytes=1000)) as core:
            tensors = _Tensors(core, manifest, world, rank)
            for step, partition_bytes in enumerate((1000, 40_000, 900, 7000, 7000, 1000, 40_000)):
                core.switch_at(SchedulerConfig(partition_bytes=partition_bytes), {tensors.group.index: step})
                tensors.average(rank, range(11, -1, -1))

    _run(open_ranks, body)


def check_static_order(open_ranks: OpenRanks, measures: bool = False) -> None:
    """Steps that repeat are launched without messages until the plan or the order of readiness changes.

    ``measures``: norms are added, which changes the tasks instead of the plan. Each rank has its own delays. The check is
    skipped where no order may become static, or no norms can be told.
    """
    manifest = Manifest(tuple(TensorSpec(f"layer{i}", (1000 + i,), "float32") for i in range(6)))
    flags = Manifest((TensorSpec("flags", (3,), "float32"),))

    def body(world: CheckedWorld, rank: int) -> None:
        if not world.freezes:
            return
        chance = random.Random(rank)
        with world.core(rank, SchedulerConfig(4100, 9000, order="static")) as core:
            static_steps: set[int] = set()
            core.observers = (TaskObserver(lambda task: static_steps.add(task.step) if core.is_static else None),)
            tensors, small = _Tensors(core, manifest, world, rank), _Tensors(core, flags, world, rank)
            if measures and world.transport(rank).norm_rows(manifest) == 0:
                return

            def run_until(seen: Callable[[], bool], order: Sequence[int]) -> int:
                """Run steps that repeat until every rank has ``seen`` what they lead to. Returns the step that comes next."""
                for step in range(1000):  # a rank may hear of it some steps late
                    tensors.begin(rank, order, lambda: _pause(chance.random() * 0.0005))
                    small.average(rank, range(1))
                    tensors.compare_norms(rank)
                    tensors.compare(rank)
                    if step >= 2 * STABLE_STEPS and all(world.gather(rank, seen())):
                        return tensors.group.step + 1
                raise AssertionError(f"in step {tensors.group.step}, launches do not fit the readiness of all steps before")

            changed = run_until(lambda: core.is_static, range(5, -1, -1))
            if measures:
                tensors.add_norms(core, world.transport(rank))
            else:
                smaller = SchedulerConfig(2000, 5000, order="static")
                core.switch_at(smaller, {tensors.group.index: changed, small.group.index: changed})
            reordered = run_until(lambda: core.is_static, range(5, -1, -1))
            assert not static_steps & {0, changed}, "the order was frozen in a step that is the first of its kind"
            # Another order of readiness ends it: not all steps are launched without messages.
            run_until(lambda: not static_steps >= set(range(reordered, tensors.group.step)), range(6))

    _run(open_ranks, body)


def check_norms(open_ranks: OpenRanks) -> None:
    """Norms of averages are exact: of two groups, from different steps on, while plans change and ranks have their own delays.

    Where the transport cannot tell norms of a group, only its averages are checked.
    """
    manifests = [
        Manifest(tuple(TensorSpec(f"{name}-{dtype}-{numel}", (numel,), dtype) for dtype in dtypes for numel in sizes))
        for name, sizes, dtypes in (
            ("a", (0, 1, 1021, 20_011), ("float32", "float64")),
            ("b", (3, 700), ("float16", "bfloat16")),
        )
    ]

    def body(world: CheckedWorld, rank: int) -> None:
        chance = random.Random(rank)
        with world.core(rank, SchedulerConfig(10_007, 30_000)) as core:
            groups = [_Tensors(core, manifest, world, rank) for manifest in manifests]
            for step, partition_bytes in enumerate((10_007, 1500, 2**20, 10_007, 2**20, 1500)):
                if step in (1, 3) and world.transport(rank).norm_rows(manifests[step // 2]):
                    _pause(chance.random() * 0.01)
                    groups[step // 2].add_norms(core, world.transport(rank))
                core.switch_at(SchedulerConfig(partition_bytes, 30_000), dict.fromkeys(range(core.group_count), step))
                for tensors in groups:
                    order = list(range(len(tensors.group.manifest.tensors)))
                    chance.shuffle(order)
                    tensors.begin(rank, order, lambda: _pause(chance.random() * 0.001))
                for tensors in groups:
                    tensors.compare_norms(rank)
                for tensors in groups:
                    tensors.compare(rank)

    _run(open_ranks, body)


def check_leaver(open_world: OpenWorld, *, timeout_seconds: float = 60.0, open_device: OpenDevice | None = None) -> None:
    """When a rank leaves while others continue, their waits raise PeerLost, which names that rank."""
    manifest = Manifest(tuple(TensorSpec(f"layer{i}", (300,), "float32") for i in range(6)))
    leaver, world_size = 1, 3
    left = threading.Barrier(world_size)

    def body(world: CheckedWorld, rank: int) -> None:
        with world.core(rank, SchedulerConfig(partition_bytes=1200)) as core:
            tensors = _Tensors(core, manifest, world, rank)
            tensors.average(rank, range(6))
            core.drain()
            if rank == leaver:
                core.prepare_leave()
                left.wait(timeout_seconds)
                left.wait(timeout_seconds)
                return
            left.wait(timeout_seconds)
            core.leave(leaver)
            try:
                tensors.average(rank, range(6))
                outcome = "no error"
            except PeerLost as error:
                outcome = str(error)
            finally:
                left.wait(timeout_seconds)
            assert f"rank {leaver} left" in outcome, f"rank {rank} waited for rank {leaver}, which left, and got: {outcome}"

    with Threads(open_world, world_size, timeout_seconds, open_device) as world:
        world.failures_expected = True
        world.run(body)


def check_close(open_world: OpenWorld) -> None:
    """``close`` may be called again, and leaves no thread of commsched behind."""
    before = set(threading.enumerate())
    with Threads(open_world, 2) as world:
        run_world(2, lambda rank: world.transports[rank].close(), timeout_seconds=60.0)
        for transport in world.transports:
            transport.close()
        assert not world.failures, f"closing in good order was reported as a failure: {world.failures[0]}"
    left = [t for t in threading.enumerate() if t.name.startswith("commsched") and t not in before]
    for thread in left:
        thread.join(60.0)
    left = [thread for thread in left if thread.is_alive()]
    assert not left, f"threads are left after close: {[thread.name for thread in left]}"


class _HostMemory:
    """Flat buffers in the host's memory. ``stream`` and events are for nothing."""

    stream: DeviceStream | None = None

    def __init__(self, manifest: Manifest) -> None:
        self._arrays = {dtype: np.zeros(nbytes, np.uint8) for dtype, nbytes in manifest.buffer_bytes.items()}
        self.buffers: dict[str, Buffer] = {dtype: array.data for dtype, array in self._arrays.items()}

    def write(self, dtype: str, at: slice, data: bytes) -> Event | None:
        self._arrays[dtype][at] = np.frombuffer(data, np.uint8)
        return None

    def read(self, dtype: str, at: slice) -> bytes:
        return self._arrays[dtype][at].tobytes()


class _DeviceMemory:
    """Flat buffers on a device. What is written and read passes through memory of the host, in the order of ``stream``."""

    def __init__(self, device: Device, manifest: Manifest) -> None:
        sizes = manifest.buffer_bytes.items()
        self.stream = device.stream()
        self.buffers = {dtype: device.allocate(nbytes) for dtype, nbytes in sizes}
        self._given = {dtype: device.allocate_host(nbytes) for dtype, nbytes in sizes}
        self._taken = {dtype: device.allocate_host(nbytes) for dtype, nbytes in sizes}

    def write(self, dtype: str, at: slice, data: bytes) -> Event | None:
        self._given[dtype][at] = data
        self.stream.copy(self.buffers[dtype][at], self._given[dtype][at])
        return self.stream.record()

    def read(self, dtype: str, at: slice) -> bytes:
        self.stream.copy(self._taken[dtype][at], self.buffers[dtype][at])
        self.stream.synchronize()
        return self._taken[dtype][at].tobytes()


class _Tensors:
    """A group on one rank with its buffers. Writes contributions into the buffers and compares the averages."""

    def __init__(self, core: Core, manifest: Manifest, world: CheckedWorld, rank: int) -> None:
        device = world.device(rank)
        self._memory = _HostMemory(manifest) if device is None else _DeviceMemory(device, manifest)
        self.group = core.add_group(core.cut(manifest, core.config), self._memory.buffers, device=device)
        self._world_size = world.size
        self._norms: Norms | None = None

    def add_norms(self, core: Core, transport: Transport) -> None:
        """Tell the norms of the averages from the next step on."""
        manifest = rows_for(self.group, (2.0, math.inf, 1.0), transport)
        data = bytearray(manifest.nbytes)
        rows = core.add_group(core.cut(manifest, core.config), {ROW_DTYPE: memoryview(data)})
        self._norms = Norms(self.group, rows, data, core.fail)

    def average(self, rank: int, order: Sequence[int], before_each: Callable[[], None] = lambda: None) -> None:
        """Run one step: the tensors become ready in ``order``, then all averages are compared, front tensor first."""
        self.begin(rank, order, before_each)
        self.compare(rank)

    def begin(self, rank: int, order: Sequence[int], before_each: Callable[[], None] = lambda: None) -> None:
        step = self.begin_step()
        tensors = self.group.manifest.tensors
        for tensor in order:
            before_each()
            self.submit(tensor, _contribution(tensors[tensor], tensor, rank, step, self._world_size))

    def compare(self, rank: int) -> None:
        step = self.group.step
        for tensor, spec in enumerate(self.group.manifest.tensors):
            expected = _expected(spec, tensor, step, self._world_size)
            assert self.receive(tensor) == expected, f"rank {rank} got a wrong average of {spec} in step {step}"

    def compare_norms(self, rank: int) -> None:
        """Compare the norms of the averages of this step, if they were added. They are of small integers, so they are exact."""
        norms, step = self._norms, self.group.step
        if norms is None:
            return
        for order in norms.orders:
            for tensor, spec in enumerate(self.group.manifest.tensors):
                expected = np.abs(_from_bytes(_expected(spec, tensor, step, self._world_size), spec.dtype).astype(np.float64))
                wanted = np.linalg.norm(expected, order) if spec.numel else 0.0
                got = norms.of(order)[tensor]
                assert got == wanted, f"rank {rank} got {got} as the {order:g}-norm of {spec} in step {step}, not {wanted}"

    def begin_step(self) -> int:
        return self.group.begin_step(self._memory.stream)

    def submit(self, tensor: int, data: bytes) -> None:
        self.group.notify_ready(tensor, self._memory.write(*self._place(tensor), data))

    def receive(self, tensor: int) -> bytes:
        self.group.proxies[tensor].wait(self._memory.stream)
        return self._memory.read(*self._place(tensor))

    def _place(self, tensor: int) -> tuple[str, slice]:
        spec, start = self.group.manifest.tensors[tensor], self.group.manifest.offset(tensor)
        return spec.dtype, slice(start, start + spec.nbytes)


def _run(open_ranks: OpenRanks, body: Callable[[CheckedWorld, int], None], collective: str = "all_reduce") -> None:
    with open_ranks() as world:
        if collective == "all_reduce" or world.splits:
            world.run(body)


#: Period, in elements, of the values below.
_PERIOD = 17 * 4


def _average_values(tensor: int, step: int) -> NDArray[np.float64]:
    return np.asarray((np.arange(_PERIOD) * 7 + tensor * 5 + step * 3) % 17 - 8, np.float64)


def _contribution(spec: TensorSpec, tensor: int, rank: int, step: int, world_size: int) -> bytes:
    if spec.dtype == "uint8":
        return ((np.arange(spec.numel) * 31 + tensor + step + 7 * rank) % 256).astype(np.uint8).tobytes()
    spread = (np.arange(_PERIOD) * 3 + step) % 4 + 1  # multiplied by one integer per rank; these integers sum to zero
    return _repeated(_average_values(tensor, step) + spread * (2 * rank - (world_size - 1)), spec)


def _expected(spec: TensorSpec, tensor: int, step: int, world_size: int) -> bytes:
    if spec.dtype != "uint8":
        return _repeated(_average_values(tensor, step), spec)
    parts = [np.frombuffer(_contribution(spec, tensor, rank, step, world_size), np.uint8) for rank in range(world_size)]
    return np.sum(parts, axis=0, dtype=np.uint8).tobytes()  # sums of bytes are not divided


def _repeated(values: NDArray[Any], spec: TensorSpec) -> bytes:
    return (_to_bytes(values, spec.dtype) * (spec.numel // _PERIOD + 1))[: spec.nbytes]


def _to_bytes(values: NDArray[Any], dtype: str) -> bytes:
    """Return ``values`` as bytes of ``dtype``, which must represent them exactly."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(dtype).tobytes()


def _from_bytes(data: bytes, dtype: str) -> NDArray[Any]:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype)


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)
