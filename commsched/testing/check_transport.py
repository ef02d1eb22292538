"""check_transport: what every transport must do. Needs no test framework; raises AssertionError where one does not.

Contributions are small integers whose average over the ranks is an integer too, so the expected bits are known exactly
whatever type they travel in and however they are rounded. They depend on rank, step and place, so a missing, stale or
misplaced contribution shows.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.config import SchedulerConfig
from ..core.core import Core
from ..core.errors import CommschedError, PeerLost
from ..core.group import TensorGroup
from ..core.manifest import ITEMSIZE, Manifest, TensorSpec
from ..core.plan import cut
from ..core.ports import OnFailure, Transport
from .world import run_world

#: Opens a transport for every rank, in one process: the n-th is rank n, and tells its failures to the n-th callback.
#: Closes them at the end. The number of callbacks is the world size.
OpenWorld = Callable[[Sequence[OnFailure]], AbstractContextManager[Sequence[Transport]]]

_ONE_AT_A_TIME = 1  # bytes of credit: a single partition is in flight


def check_transport(open_world: OpenWorld, *, rounds: int = 200, timeout_seconds: float = 60.0) -> None:
    """Run all checks below.

    Args:
        open_world: opens the transports to check.
        rounds: how many back-to-back rounds of one tensor to check.
        timeout_seconds: no single check may take longer.

    Raises:
        AssertionError: a result is wrong, or a failure was not told as it should be; says which.
        TimeoutError: a rank does not end; shows where it stands.
    """
    for world_size in (1, 2, 3, 4):
        check_averages(open_world, world_size, timeout_seconds=timeout_seconds)
    check_large_tensors(open_world, timeout_seconds=timeout_seconds)
    check_equal_bits(open_world, timeout_seconds=timeout_seconds)
    check_opposite_orders(open_world, timeout_seconds=timeout_seconds)
    check_back_to_back(open_world, rounds, timeout_seconds=timeout_seconds)
    check_recut(open_world, timeout_seconds=timeout_seconds)
    check_leaver(open_world, timeout_seconds=timeout_seconds)
    check_close(open_world)


def check_averages(open_world: OpenWorld, world_size: int, *, timeout_seconds: float = 60.0) -> None:
    """Exact averages of every dtype and odd sizes; each rank starts in an order, and with delays, of its own."""
    manifest = Manifest(
        tuple(TensorSpec(f"{dtype}-{numel}", (numel,), dtype) for numel in (1, 3, 1021, 20_011) for dtype in ITEMSIZE)
    )

    def body(world: _World, rank: int) -> None:
        chance = random.Random(rank)
        with world.core(rank, SchedulerConfig(partition_bytes=10_007, credit_bytes=30_000)) as core:
            tensors = _Tensors(core, manifest, world_size)
            for _ in range(4):
                order = list(range(len(manifest.tensors)))
                chance.shuffle(order)
                tensors.average(rank, order, lambda: _pause(chance.random() * 0.001))

    _run(open_world, world_size, body, timeout_seconds)


def check_large_tensors(open_world: OpenWorld, *, timeout_seconds: float = 60.0) -> None:
    """Tensors of several MB, whole and in partitions."""
    manifest = Manifest((TensorSpec("whole", (1_100_003,), "float32"), TensorSpec("cut", (1025, 1027), "float64")))

    def body(world: _World, rank: int) -> None:
        with world.core(rank, SchedulerConfig(partition_bytes=5_000_000)) as core:
            tensors = _Tensors(core, manifest, world.size)
            for _ in range(2):
                tensors.average(rank, range(2))

    _run(open_world, 2, body, timeout_seconds)


def check_equal_bits(open_world: OpenWorld, *, timeout_seconds: float = 60.0) -> None:
    """Of numbers that do round, every rank gets the same bits, close to the true average."""
    manifest = Manifest((TensorSpec("x", (50_021,), "float32"), TensorSpec("y", (50_021,), "bfloat16")))
    inputs = [np.random.default_rng(rank).normal(size=(2, 50_021)).astype(np.float32) for rank in range(3)]
    inputs = [values.view(np.uint32).__and__(0xFFFF0000).view(np.float32) for values in inputs]  # bfloat16 holds them
    results: list[str] = [""] * 3

    def body(world: _World, rank: int) -> None:
        with world.core(rank, SchedulerConfig(partition_bytes=30_000)) as core:
            tensors = _Tensors(core, manifest, world.size)
            tensors.group.begin_step()
            for tensor, spec in enumerate(manifest.tensors):
                tensors.write(tensor, _to_bytes(inputs[rank][tensor], spec.dtype))
                tensors.group.notify_ready(tensor)
            digest = hashlib.sha256()
            for tensor, spec in enumerate(manifest.tensors):
                tensors.group.proxies[tensor].wait()
                digest.update(tensors.read(tensor))
                average = _from_bytes(tensors.read(tensor), spec.dtype)
                expected = np.mean([values[tensor] for values in inputs], axis=0, dtype=np.float64)
                tolerance = 2**-8 if spec.dtype == "bfloat16" else 1e-6
                assert np.allclose(average, expected, rtol=tolerance, atol=tolerance), f"'{spec.name}' is far from the average"
            results[rank] = digest.hexdigest()

    _run(open_world, 3, body, timeout_seconds)
    assert len(set(results)) == 1, "ranks got different bits"


def check_opposite_orders(open_world: OpenWorld, *, timeout_seconds: float = 60.0) -> None:
    """Two ranks that start in opposite orders, one partition at a time, do not wait for each other for ever."""
    manifest = Manifest(tuple(TensorSpec(f"layer{i}", (257,), "float32") for i in range(8)))

    def body(world: _World, rank: int) -> None:
        config = SchedulerConfig(partition_bytes=1028, credit_bytes=_ONE_AT_A_TIME, policy="fifo")
        with world.core(rank, config) as core:
            tensors = _Tensors(core, manifest, world.size)
            for _ in range(3):
                tensors.average(rank, range(8) if rank == 0 else range(7, -1, -1))

    _run(open_world, 2, body, timeout_seconds)


def check_back_to_back(
    open_world: OpenWorld, rounds: int, *, world_size: int = 2, numel: int = 64, timeout_seconds: float = 60.0
) -> None:
    """Rounds of one tensor as fast as they go, with a slow last rank: each of them is exact on each rank.

    What a fast rank pushes next must never reach what the slow rank is still being sent.
    """
    manifest = Manifest((TensorSpec("weight", (numel,), "float32"),))

    def body(world: _World, rank: int) -> None:
        with world.core(rank, SchedulerConfig()) as core:
            group, buffer = _add_group(core, manifest)
            values = buffer["float32"].view(np.float32)
            for step in range(rounds):
                group.begin_step()
                values.fill(step + 2 * rank - (world_size - 1))
                if rank == world_size - 1 and step % 50 == 0:
                    _pause(0.001)
                group.notify_ready(0)
                group.proxies[0].wait()
                wrong = np.count_nonzero(values != step)
                assert wrong == 0, f"rank {rank} got {wrong} wrong numbers in round {step}, such as {values[values != step][0]}"

    _run(open_world, world_size, body, timeout_seconds)


def check_recut(open_world: OpenWorld, *, timeout_seconds: float = 60.0) -> None:
    """The same tensors in another plan each step: a partition's index may mean another range than before."""
    manifest = Manifest(tuple(TensorSpec(f"layer{i}", (1000 + i,), "float32") for i in range(6)))

    def body(world: _World, rank: int) -> None:
        with world.core(rank, SchedulerConfig(partition_bytes=1000)) as core:
            tensors = _Tensors(core, manifest, world.size)
            for step, partition_bytes in enumerate((1000, 40_000, 900, 7000, 7000, 1000, 40_000)):
                core.switch_at(SchedulerConfig(partition_bytes=partition_bytes), {tensors.group.index: step})
                tensors.average(rank, range(5, -1, -1))

    _run(open_world, 3, body, timeout_seconds)


def check_leaver(open_world: OpenWorld, *, timeout_seconds: float = 60.0) -> None:
    """A rank that leaves while others go on is named in the PeerLost that ends their waiting."""
    manifest = Manifest(tuple(TensorSpec(f"layer{i}", (300,), "float32") for i in range(6)))
    leaver, world_size = 1, 3
    left = threading.Barrier(world_size)

    def body(world: _World, rank: int) -> None:
        with world.core(rank, SchedulerConfig(partition_bytes=1200)) as core:
            tensors = _Tensors(core, manifest, world_size)
            tensors.average(rank, range(6))
            core.drain()
            if rank == leaver:
                left.wait(timeout_seconds)
                left.wait(timeout_seconds)
                return
            left.wait(timeout_seconds)
            world.transports[rank].leave(leaver)
            try:
                tensors.average(rank, range(6))
                outcome = "no error"
            except PeerLost as error:
                outcome = str(error)
            finally:
                left.wait(timeout_seconds)
            assert f"rank {leaver} left" in outcome, f"rank {rank} waited for rank {leaver}, which left, and got: {outcome}"

    _run(open_world, world_size, body, timeout_seconds, failures_expected=True)


def check_close(open_world: OpenWorld) -> None:
    """``close`` may be called again, and leaves no thread of ours behind."""
    before = set(threading.enumerate())
    with _World(open_world, 2) as world:
        run_world(2, lambda rank: world.transports[rank].close(), timeout_seconds=30.0)
        for transport in world.transports:
            transport.close()
        assert not world.failures, f"closing in good order was told as a failure: {world.failures[0]}"
    left = [t for t in threading.enumerate() if t.name.startswith("commsched") and t not in before]
    for thread in left:
        thread.join(5.0)
    left = [thread for thread in left if thread.is_alive()]
    assert not left, f"threads are left after close: {[thread.name for thread in left]}"


class _World:
    """The transports of all ranks, and the failures they told."""

    def __init__(self, open_world: OpenWorld, size: int) -> None:
        self.size = size
        self.failures: list[CommschedError] = []
        self.transports: Sequence[Transport] = ()
        self._cores: list[Core | None] = [None] * size
        self._opened = open_world([self._listener(rank) for rank in range(size)])

    def __enter__(self) -> _World:
        self.transports = self._opened.__enter__()
        assert [transport.rank for transport in self.transports] == list(range(self.size)), "ranks are not in order"
        assert {transport.world_size for transport in self.transports} == {self.size}, "a world_size is wrong"
        return self

    def __exit__(self, *exception: Any) -> None:
        self._opened.__exit__(*exception)

    def core(self, rank: int, config: SchedulerConfig) -> _OpenCore:
        """A Core on the rank's transport, closed at the end of a ``with`` block; the transport's failures end its waits."""
        core = self._cores[rank] = Core(self.transports[rank], config, on_failure=self.failures.append)
        return _OpenCore(core)

    def _listener(self, rank: int) -> OnFailure:
        def on_failure(error: CommschedError) -> None:
            self.failures.append(error)
            core = self._cores[rank]
            if core is not None:
                core.fail(error)

        return on_failure


class _OpenCore:
    def __init__(self, core: Core) -> None:
        self._core = core

    def __enter__(self) -> Core:
        return self._core

    def __exit__(self, *exception: Any) -> None:
        self._core.close()


class _Tensors:
    """A group on one rank, its buffers, and what to write into them and expect from them."""

    def __init__(self, core: Core, manifest: Manifest, world_size: int) -> None:
        self.group, self._buffers = _add_group(core, manifest)
        self._world_size = world_size

    def average(self, rank: int, order: Sequence[int], before_each: Callable[[], None] = lambda: None) -> None:
        """One step: the tensors become ready in ``order``, then all averages are compared, front tensor first."""
        step = self.group.begin_step()
        tensors = self.group.manifest.tensors
        for tensor in order:
            before_each()
            self.write(tensor, _contribution(tensors[tensor], tensor, rank, step, self._world_size))
            self.group.notify_ready(tensor)
        for tensor, spec in enumerate(tensors):
            self.group.proxies[tensor].wait()
            expected = _expected(spec, tensor, step, self._world_size)
            assert self.read(tensor) == expected, f"rank {rank} got a wrong average of {spec} in step {step}"

    def write(self, tensor: int, data: bytes) -> None:
        self._view(tensor)[:] = np.frombuffer(data, np.uint8)

    def read(self, tensor: int) -> bytes:
        return self._view(tensor).tobytes()

    def _view(self, tensor: int) -> NDArray[np.uint8]:
        spec, start = self.group.manifest.tensors[tensor], self.group.manifest.offset(tensor)
        return self._buffers[spec.dtype][start : start + spec.nbytes]


def _add_group(core: Core, manifest: Manifest) -> tuple[TensorGroup, dict[str, NDArray[np.uint8]]]:
    buffers = {dtype: np.zeros(nbytes, np.uint8) for dtype, nbytes in manifest.buffer_bytes.items()}
    plan = cut(manifest, core.config.partition_bytes)
    return core.add_group(plan, {dtype: buffer.data for dtype, buffer in buffers.items()}), buffers


def _run(
    open_world: OpenWorld,
    world_size: int,
    body: Callable[[_World, int], None],
    timeout_seconds: float,
    failures_expected: bool = False,
) -> None:
    """Run ``body`` once per rank, each in a thread of its own."""
    with _World(open_world, world_size) as world:
        run_world(world_size, lambda rank: body(world, rank), timeout_seconds=timeout_seconds)
        assert failures_expected or not world.failures, f"a failure was told though all went well: {world.failures[0]}"


def _average_values(spec: TensorSpec, tensor: int, step: int) -> NDArray[np.float64]:
    return np.asarray((np.arange(spec.numel) * 7 + tensor * 5 + step * 3) % 17 - 8, np.float64)


def _contribution(spec: TensorSpec, tensor: int, rank: int, step: int, world_size: int) -> bytes:
    if spec.dtype == "uint8":
        return ((np.arange(spec.numel) * 31 + tensor + step + 7 * rank) % 256).astype(np.uint8).tobytes()
    spread = (np.arange(spec.numel) * 3 + step) % 4 + 1  # times an odd or even number per rank; their sum is zero
    return _to_bytes(_average_values(spec, tensor, step) + spread * (2 * rank - (world_size - 1)), spec.dtype)


def _expected(spec: TensorSpec, tensor: int, step: int, world_size: int) -> bytes:
    if spec.dtype != "uint8":
        return _to_bytes(_average_values(spec, tensor, step), spec.dtype)
    parts = [np.frombuffer(_contribution(spec, tensor, rank, step, world_size), np.uint8) for rank in range(world_size)]
    return np.sum(parts, axis=0, dtype=np.uint8).tobytes()  # sums of bytes are not divided


def _to_bytes(values: NDArray[Any], dtype: str) -> bytes:
    """``values``, which ``dtype`` can hold exactly."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(dtype).tobytes()


def _from_bytes(data: bytes, dtype: str) -> NDArray[Any]:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype)


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)
