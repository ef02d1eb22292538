"""float32 as a 16-bit type on the way: rounded once on each side, the same bits everywhere."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.core.interfaces import Completion, ForwardingTransport, OnFailure, Transport
from commsched.core.manifest import ITEMSIZE, Manifest, TensorSpec
from commsched.core.plan import Partition, cut
from commsched.core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask
from commsched.devices.backends.host import HostDevice
from commsched.testing.check_transport import (
    check_averages,
    check_back_to_back,
    check_close,
    check_leaver,
    check_opposite_orders,
    check_random_rounds,
    check_recut,
)
from commsched.testing.checked_world import OpenWorld, Threads
from commsched.transports.averaging.reduce import average, narrow, widen
from commsched.transports.backends.local import LocalWorld
from commsched.transports.wire import DtypeMapping, WireTransport

from .worlds import embedded_world, local_world

DTYPES = ("bfloat16", "float16")


@contextmanager
def wired(open_world: OpenWorld, dtype: str, listeners: Sequence[OnFailure]) -> Iterator[Sequence[Transport]]:
    with open_world(listeners) as transports:
        yield [WireTransport(transport, dtype) for transport in transports]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("open_world", [local_world, embedded_world])
def test_is_a_transport(open_world: OpenWorld, dtype: str) -> None:
    world = partial(wired, open_world, dtype)
    for size in (1, 2, 3):
        open_ranks = partial(Threads, world, size)
        check_averages(open_ranks)
        check_random_rounds(open_ranks, 20)
        check_recut(open_ranks)
    check_opposite_orders(partial(Threads, world, 2))
    check_back_to_back(partial(Threads, world, 3), 200)
    check_leaver(world)
    check_close(world)


def test_memory_for_gradients_is_never_that_of_the_transport_within() -> None:
    """Which would have another dtype."""

    class Sharing(ForwardingTransport):
        def mirror(self, *arguments: object) -> dict[str, memoryview]:
            raise AssertionError

    manifest = Manifest((TensorSpec("x", (4,), "float32"),))
    assert WireTransport(Sharing(LocalWorld(1).transport(0, pytest.fail)), "float16").mirror(0, manifest, HostDevice()) is None


class Kept:
    """A Completion that counts."""

    def __init__(self) -> None:
        self.sent: list[CommTask] = []
        self.done: list[CommTask] = []

    def on_sent(self, task: CommTask) -> None:
        self.sent.append(task)

    def on_done(self, task: CommTask) -> None:
        self.done.append(task)


def averaged(inputs: Sequence[np.ndarray], dtype: str) -> list[np.ndarray]:
    """What each rank gets."""
    world = LocalWorld(len(inputs))
    manifest = Manifest((TensorSpec("x", inputs[0].shape, "float32"),))
    buffers = [bytearray(each.tobytes()) for each in inputs]
    kept = Kept()
    transports = [WireTransport(world.transport(rank, pytest.fail), dtype) for rank in range(len(inputs))]
    for transport in transports:
        transport.add_group(0, manifest)
    for transport, buffer in zip(transports, buffers):
        transport.start(CommTask(0, 0, cut(manifest, 2**20).partitions[0], memoryview(buffer)), kept)
    assert len(kept.sent) == len(kept.done) == len(inputs)
    return [np.frombuffer(buffer, np.float32) for buffer in buffers]


@pytest.mark.parametrize("dtype", DTYPES)
def test_contributions_and_the_average_are_each_rounded_once_and_all_ranks_get_the_same_bits(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    inputs = [np.random.default_rng(rank).normal(size=70_001).astype(np.float32) for rank in range(3)]
    rounded = [torch.from_numpy(each).to(kind).float() for each in inputs]
    expected = ((rounded[0] + rounded[1] + rounded[2]) / 3).to(kind).float().numpy()
    for result in averaged(inputs, dtype):
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_what_they_are_and_too_much_becomes_infinite(dtype: str) -> None:
    quiet, loud = np.array([0x7FC00000, 0x7F800001], np.uint32).view(np.float32)
    largest = {"float16": 65504.0, "bfloat16": 3.3895314e38}[dtype]
    beyond = {"float16": 65520.0, "bfloat16": 3.4e38}[dtype]
    values = np.array([quiet, loud, -np.inf, np.inf, largest, beyond, -beyond], np.float32)
    bits = np.array([0xFFFFFFFF, 0x7FFFFFFF, 0xFF800001], np.uint32).view(np.float32)  # NaN whose rounding would carry
    (result,) = averaged([np.concatenate([values, bits])], dtype)
    assert np.isnan(result[[0, 1, 7, 8, 9]]).all()
    np.testing.assert_array_equal(result[2:7], np.array([-np.inf, np.inf, largest, np.inf, -np.inf], np.float32))


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_narrowing_equals_torch(values: list[float]) -> None:
    torch = pytest.importorskip("torch")
    source = np.array(values, np.float32)
    for dtype in DTYPES:
        out = bytearray(2 * source.size)
        narrow(source.data, dtype, out)
        back = np.empty(source.size, np.float32)
        widen(out, dtype, back.data)
        np.testing.assert_array_equal(back, torch.from_numpy(source).to(getattr(torch, dtype)).float().numpy())


class Splitting(Transport):
    """One rank's transport of a world of two whose other rank contributes zeros; reduce-scatters and all-gathers."""

    rank, world_size, ordered = 0, 2, True
    verbs = frozenset({ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER})

    def __init__(self) -> None:
        self.started: list[CommTask] = []

    def add_group(self, group: int, manifest: Manifest) -> None:
        self.manifest = manifest

    def start(self, task: CommTask, completion: Completion) -> None:
        self.started.append(task)
        completion.on_sent(task)
        if task.verb == REDUCE_SCATTER:
            chunk = task.data[: len(task.data) // 2]
            average([bytes(chunk), bytes(len(chunk))], task.partition.dtype, chunk)
        else:
            task.data[len(task.data) // 2 :] = task.data[: len(task.data) // 2]
        completion.on_done(task)

    def release(self, group: int) -> None:
        self.released = group


def test_an_all_gather_sends_what_the_reduce_scatter_left_and_keeps_order_channel_and_sequence() -> None:
    inner = Splitting()
    wire = WireTransport(inner, "bfloat16")
    manifest = Manifest((TensorSpec("x", (4,), "float32"),))
    wire.add_group(0, manifest)
    values = np.array([1.0, 3.0, 100.0, 100.0], np.float32)
    data = memoryview(values).cast("B")
    at = cut(manifest, 100).partitions[0]
    for sequence, verb in enumerate((REDUCE_SCATTER, ALL_GATHER)):
        task = CommTask(0, 0, at, data, verb)
        task.order, task.channel, task.sequence = 7, 1, sequence
        wire.start(task, Kept())
    assert values.tolist() == [0.5, 1.5, 0.5, 1.5]
    scatter, gather = inner.started
    assert scatter.data is gather.data
    assert [(task.verb, task.order, task.channel, task.sequence) for task in inner.started] == [
        (REDUCE_SCATTER, 7, 1, 0),
        (ALL_GATHER, 7, 1, 1),
    ]
    wire.release(0)
    assert inner.released == 0
    assert wire.verbs == inner.verbs
    assert (wire.ordered, wire.channels) == (True, 1)


def test_each_partition_gathers_what_its_own_reduce_scatter_left() -> None:
    inner = Splitting()
    wire = WireTransport(inner, "bfloat16")
    manifest = Manifest((TensorSpec("x", (12,), "float32"),))
    wire.add_group(0, manifest)
    values = np.arange(1.0, 13.0, dtype=np.float32)
    data = memoryview(values).cast("B")
    plan = cut(manifest, 16)
    for verb, order in ((REDUCE_SCATTER, (0, 1, 2)), (ALL_GATHER, (2, 0, 1))):
        for index in order:
            at = plan.partitions[index]
            wire.start(CommTask(0, 0, at, data[at.start : at.stop], verb), Kept())
    scattered, gathered = inner.started[:3], inner.started[3:]
    assert all(gathered[place].data is scattered[index].data for place, index in enumerate((2, 0, 1)))
    assert values.tolist() == [0.5, 1.0, 0.5, 1.0, 2.5, 3.0, 2.5, 3.0, 4.5, 5.0, 4.5, 5.0]


def test_memory_is_used_again() -> None:
    wire = WireTransport(LocalWorld(1).transport(0, pytest.fail), "bfloat16")
    manifest = Manifest((TensorSpec("x", (1000,), "float32"),))
    wire.add_group(0, manifest)
    for step in range(5):
        wire.start(CommTask(0, step, cut(manifest, 4000).partitions[0], memoryview(bytearray(4000))), Kept())
    gc.collect()
    assert "at most 2000 B" in repr(wire._buffers)


# --- where partitions are in a buffer that several dtypes share ---


@st.composite
def manifests(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Manifest:
    shapes = st.tuples(st.integers(0, 40), st.sampled_from(sorted(ITEMSIZE)))
    specs = draw(st.lists(shapes, max_size=12))
    return Manifest(tuple(TensorSpec(f"t{i}", (numel,), dtype) for i, (numel, dtype) in enumerate(specs)))


@given(
    manifests(), st.integers(1, 100), st.sampled_from([{"float32": "bfloat16"}, {"float16": "float32", "bfloat16": "float32"}])
)
def test_partitions_of_the_other_manifest_cover_it_once(
    manifest: Manifest, partition_bytes: int, dtypes: dict[str, str]
) -> None:
    recast = DtypeMapping(manifest, dtypes)
    seen = {dtype: bytearray(nbytes) for dtype, nbytes in recast.manifest.buffer_bytes.items()}
    for original in cut(manifest, partition_bytes, servers=3).partitions:
        there = recast.partition(original)
        assert there.server == original.server
        assert there.nbytes // ITEMSIZE[there.dtype] == original.nbytes // ITEMSIZE[original.dtype]
        assert recast.manifest.names_in(there.dtype, there.start, there.stop) == manifest.names_in(
            original.dtype, original.start, original.stop
        )
        for place in range(there.start, there.stop):
            seen[there.dtype][place] += 1
    assert all(set(count) <= {1} for count in seen.values())


def test_a_partition_of_tensors_that_are_not_consecutive_is_refused() -> None:
    manifest = Manifest(tuple(TensorSpec(dtype, (2,), dtype) for dtype in ("float32", "bfloat16", "float32")))
    with pytest.raises(ValueError, match="partition 0 holds tensors that are not consecutive"):
        DtypeMapping(manifest, {"float32": "bfloat16"}).partition(Partition(0, "float32", 0, 16, (0, 2)))
