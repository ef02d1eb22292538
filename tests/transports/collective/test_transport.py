"""What a transport makes of a backend's collectives."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.core.errors import ClosedError, CommschedError, OrderMismatch, PeerLost, TransportError
from commsched.core.manifest import ITEMSIZE, Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask
from commsched.testing.checked_world import Meeting
from commsched.transports.averaging.reduce import average
from commsched.transports.backend import Contributors
from commsched.transports.collective import CollectiveTransport
from commsched.transports.collective import transport as collective
from commsched.transports.collective.channel import CannotBegin
from commsched.transports.collective.failures import DeferredFailure
from commsched.transports.collective.transport import chunks_of

from .memory import Network


@pytest.fixture(autouse=True)
def _small_worlds_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large ones do."""
    monkeypatch.setattr(collective, "EXCHANGE_UP_TO", 0)


def test_up_to_so_many_ranks_what_a_channel_could_sum_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "EXCHANGE_UP_TO", 2)
    for world_size, sums in ((2, 0), (3, 1)):
        ranks = Ranks(world_size)
        for rank in range(world_size):
            ranks.start(rank, bytearray(16))
        assert len(ranks.networks[0].sums) == sums


def test_two_ranks_exchange_each_partition_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "EXCHANGE_UP_TO", 16)
    for world_size, exchanges in ((2, 1), (3, 2)):
        ranks = Ranks(world_size)
        for rank in range(world_size):
            ranks.start(rank, bytearray(16))
        assert [len(channels[0].tags) for channels in ranks.channels] == [exchanges] * world_size


MANIFEST = Manifest((TensorSpec("embedding", (4,), "float32"), TensorSpec("head", (4,), "float32")))


class Completion:
    def __init__(self) -> None:
        self.done: list[CommTask] = []

    def on_sent(self, task: CommTask) -> None:
        raise AssertionError("sent is implied by done")

    def on_done(self, task: CommTask) -> None:
        self.done.append(task)


class Ranks:
    """The transports of all ranks, and tasks over one partition after another."""

    def __init__(self, world_size: int, manifest: Manifest = MANIFEST, **context: Any) -> None:
        self.failures: list[CommschedError] = []
        self.failed = threading.Event()
        self.completion = Completion()
        self.networks = [Network(world_size), Network(world_size)]
        self.channels = [[network.channel(rank) for network in self.networks] for rank in range(world_size)]
        self.partitions = cut(manifest, 1 << 30, 1).partitions
        meeting = Meeting(world_size)
        self.transports = []
        for rank in range(world_size):
            made = CollectiveTransport(replace(meeting.context(rank, self._fail), **context), self.channels[rank])
            made.add_group(0, manifest)
            self.transports.append(made)

    def _fail(self, error: CommschedError) -> None:
        self.failures.append(error)
        self.failed.set()

    def task(
        self, data: bytearray, sequence: int = 0, partition: int = 0, verb: str = ALL_REDUCE, channel: int = 0
    ) -> CommTask:
        task = CommTask(0, 7, self.partitions[partition], memoryview(data))
        task.verb, task.sequence, task.channel = verb, sequence, channel
        return task

    def start(self, rank: int, *args: Any, **kwargs: Any) -> None:
        self.transports[rank].start(self.task(*args, **kwargs), self.completion)


def contribution(rank: int, numel: int, dtype: str) -> bytearray:
    values = np.random.default_rng([rank, numel]).normal(size=numel)
    if dtype == "bfloat16":
        return bytearray((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes())
    if dtype == "uint8":
        return bytearray((values * 50).astype(np.int64).astype(np.uint8).tobytes())
    return bytearray(values.astype(dtype).tobytes())


@pytest.mark.parametrize("verbs", [[ALL_REDUCE], [REDUCE_SCATTER, ALL_GATHER]], ids=["all_reduce", "rsag"])
@pytest.mark.parametrize("exchange_up_to", [0, 16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_average_is_that_of_a_sum_in_rank_order(
    world_size: int, exchange_up_to: int, verbs: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "EXCHANGE_UP_TO", exchange_up_to)
    manifest = Manifest(tuple(TensorSpec(f"{dtype}-{n}", (n,), dtype) for n in (1, 2, 4, 103) for dtype in ITEMSIZE))
    ranks = Ranks(world_size, manifest)
    for index, (spec, at) in enumerate(zip(manifest.tensors, ranks.partitions)):
        data = [contribution(rank, spec.numel, at.dtype) for rank in range(world_size)]
        expected = bytearray(len(data[0]))
        average([bytes(each) for each in data], at.dtype, expected)
        for phase, verb in enumerate(verbs):
            for rank in reversed(range(world_size)):
                ranks.start(rank, data[rank], index * len(verbs) + phase, index, verb)
        for each in data:
            if at.dtype in ("float32", "float64"):
                assert np.allclose(np.frombuffer(each, at.dtype), np.frombuffer(expected, at.dtype), rtol=1e-6, atol=1e-6), spec
            else:
                assert each == expected, spec
        assert len(set(map(bytes, data))) == 1, spec
    assert len(ranks.completion.done) == world_size * len(ranks.partitions) * len(verbs)
    assert not ranks.failures


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_reduce_scatter_leaves_the_average_in_the_own_chunk(world_size: int, dtype: str) -> None:
    numel, size = 10, ITEMSIZE[dtype]
    ranks = Ranks(world_size, Manifest((TensorSpec("x", (numel,), dtype),)))
    data = [contribution(rank, numel, dtype) for rank in range(world_size)]
    expected = bytearray(numel * size)
    average([bytes(each) for each in data], dtype, expected)
    for rank in range(world_size):
        ranks.start(rank, data[rank], verb=REDUCE_SCATTER)
    for rank in range(world_size):
        own = slice(numel * rank // world_size * size, numel * (rank + 1) // world_size * size)
        assert data[rank][own] == expected[own]  # in rank order, bit for bit
    assert len(ranks.completion.done) == world_size


def test_a_16_bit_partition_costs_the_bytes_of_a_ring() -> None:
    world_size, numel = 4, 400
    ranks = Ranks(world_size, Manifest((TensorSpec("x", (numel,), "float16"),)))
    for rank in range(world_size):
        ranks.start(rank, bytearray(2 * numel))
    assert ranks.networks[0].sent_bytes == [2 * 2 * numel * (world_size - 1) // world_size] * world_size


def test_channels_are_apart() -> None:
    ranks = Ranks(2)
    data = [np.full(4, value, np.float32) for value in (1.0, 2.0, 3.0, 6.0)]
    for rank, order in enumerate([(0, 1), (1, 0)]):
        for channel in order:
            task = ranks.task(bytearray(), partition=channel, channel=channel)
            task.data = memoryview(data[2 * rank + channel]).cast("B")
            ranks.transports[rank].start(task, ranks.completion)
    assert [each.tolist() for each in data] == [[2.0] * 4, [4.0] * 4] * 2


def test_the_sum_of_sums_is_divided_by_the_number_of_ranks_of_the_job() -> None:
    ranks = Ranks(2, contributors=Contributors((0, 1), 8))
    data = [bytearray(np.full(4, 4.0 * (rank + 1), np.float32)) for rank in range(2)]
    for sequence, verb in enumerate([ALL_REDUCE, REDUCE_SCATTER]):
        for rank in range(2):
            ranks.start(rank, data[rank], sequence, verb=verb)
    assert np.frombuffer(data[0], np.float32).tolist() == [0.375, 0.375, 1.5, 1.5]


def test_tags_differ_between_phases_and_stay_below_what_backends_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commsched.transports.collective.transport.MAX_TAGS", 6)
    ranks = Ranks(3, Manifest((TensorSpec("x", (3,), "float16"),)))
    for sequence in range(4):
        for rank in range(3):
            ranks.start(rank, bytearray(6), sequence)
    assert ranks.channels[0][0].tags == [0, 1, 2, 3, 4, 5, 0, 1]


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([1], r"rank 5 was asked to all_reduce tensor 'head' of step 7 at place 1 of channel 1, but place 0 is next \(first\)"),
        (
            [0, 2],
            r"'head' of step 7 at place 2 of channel 1, but place 1 is next \(after 0: all_reduce tensor 'embedding' of",
        ),
        (
            [0, 0],
            r"'head' of step 7 at place 0 of channel 1, but place 1 is next \(after 0: all_reduce tensor 'embedding' of",
        ),
    ],
)
def test_a_start_out_of_order_is_refused_and_names_both_tensors(sequences: list[int], message: str) -> None:
    ranks = Ranks(2, contributors=Contributors((5, 6), 2))
    for sequence in sequences[:-1]:
        ranks.start(0, bytearray(16), sequence, channel=1)
    with pytest.raises(OrderMismatch, match=message):
        ranks.start(0, bytearray(16), sequences[-1], partition=1, channel=1)
    assert len(ranks.networks[1].sums) == len(sequences) - 1


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's verdict is not waited for: there is no control channel here."""
    monkeypatch.setattr(DeferredFailure.__init__, "__defaults__", (0.01,))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("verb", [ALL_REDUCE, REDUCE_SCATTER])
def test_what_a_backend_says_is_told_with_the_tensor_and_the_step(verb: str) -> None:
    ranks = Ranks(2)
    ranks.channels[1][0].broken = RuntimeError("connection closed by 10.0.0.1")
    ranks.start(1, bytearray(16), partition=1, verb=verb)
    assert ranks.failed.wait(60)
    assert isinstance(ranks.failures[0], PeerLost)
    assert str(ranks.failures[0]) == (
        f"rank 1 lost contact with another rank while it tried to {verb} tensor 'head' of step 7: connection closed by 10.0.0.1"
    )
    assert not ranks.completion.done
    ranks.transports[1].close()
    assert [channel.closed for channel in ranks.channels[1]] == [False, False]  # something is still under way


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("raises", [True, False])
def test_an_operation_that_cannot_begin_blames_no_other_rank(raises: bool) -> None:
    ranks = Ranks(2)
    error = ValueError("no such rank") if raises else CannotBegin("ValueError: no such rank")
    ranks.channels[1][0].broken, ranks.channels[1][0].raises = error, raises
    ranks.start(1, bytearray(16), partition=1)
    assert ranks.failed.wait(60)
    assert type(ranks.failures[0]) is TransportError
    assert str(ranks.failures[0]) == "rank 1 failed to all_reduce tensor 'head' of step 7: ValueError: no such rank"


@pytest.mark.usefixtures("impatient")
def test_an_error_of_ours_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(1)

    class Broken(Completion):
        def on_done(self, task: CommTask) -> None:
            raise KeyError("no such state")

    ranks.transports[0].start(ranks.task(bytearray(16)), Broken())
    assert ranks.failed.wait(60)
    assert isinstance(ranks.failures[0], TransportError)
    assert "rank 0 failed to all_reduce tensor 'embedding' of step 7: KeyError: 'no such state'" in str(ranks.failures[0])
    assert "failed to all_reduce" in caplog.text


def test_closing_when_idle_is_graceful_and_once() -> None:
    ranks = Ranks(2)
    for rank in range(2):
        ranks.start(rank, bytearray(16))
    for transport in ranks.transports:
        transport.close()
        transport.close(graceful=False)
    assert [channel.closed for channels in ranks.channels for channel in channels] == [True] * 4
    with pytest.raises(ClosedError, match="this transport is closed"):
        ranks.start(0, bytearray(16), 1)


@pytest.mark.parametrize("graceful", [True, False])
def test_what_ends_after_close_is_neither_done_nor_a_failure(graceful: bool) -> None:
    ranks = Ranks(2)
    ranks.start(0, bytearray(16))
    ranks.start(0, bytearray(16), 1, 1)
    ranks.transports[0].close(graceful)
    assert [channel.closed for channel in ranks.channels[0]] == [False, False]
    (_, _, done), (_, _, other) = (ranks.networks[0].sums[place][0] for place in (0, 1))
    done(None)
    other(RuntimeError("aborted"))
    assert not ranks.completion.done
    assert not ranks.failures


def test_it_is_an_ordered_transport_of_all_verbs() -> None:
    transport = Ranks(3).transports[2]
    assert (transport.rank, transport.world_size, transport.ordered, transport.channels) == (2, 3, True, 2)
    assert transport.verbs == {ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER}
    transport.leave(1)  # nothing waits for one that left: Core agrees on what is launched


# --- chunks ---


@given(st.integers(0, 50), st.sampled_from([1, 2, 4, 8]), st.integers(1, 9))
def test_chunks_cover_the_partition_once_on_element_borders(numel: int, itemsize: int, world_size: int) -> None:
    data = memoryview(bytes(index % 251 for index in range(numel * itemsize)))
    chunks = chunks_of(data, itemsize, world_size)
    assert len(chunks) == world_size
    assert b"".join(chunks) == data
    sizes = [len(chunk) for chunk in chunks]
    assert all(size % itemsize == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= itemsize


def test_chunks_are_views() -> None:
    data = bytearray(6)
    chunks_of(memoryview(data), 2, 3)[1][:] = b"ab"
    assert data == b"\0\0ab\0\0"
