"""The state of a parameter server: who may push what and when, and what waits for whom."""

import gc
import inspect
import random
import threading
import tracemalloc
from collections import deque
from itertools import permutations
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched.core.errors import FEWER_BATCHES, CommschedError, ManifestMismatch, PeerLost, ProtocolError
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.norms import NormsOf
from commsched.testing.world import run_world
from commsched.transports.averaging.aggregator import Aggregator
from commsched.transports.averaging.contributions import PartitionKey
from commsched.transports.backend import Contributors

MANIFEST = Manifest((TensorSpec("embedding", (4,), "float32"), TensorSpec("head", (4,), "float32")))
FRONT = ("float32", 0, 16)
BACK = ("float32", 16, 32)


class World:
    """An aggregator with its group announced by every rank; pushes constants and keeps what comes back."""

    def __init__(self, size: int, manifest: Manifest = MANIFEST) -> None:
        self.failures: list[CommschedError] = []
        self.aggregator = Aggregator(Contributors.all_ranks(size), self.failures.append)
        self.results: list[tuple[int, PartitionKey, list[float]]] = []
        for rank in range(size):
            self.aggregator.add_group(rank, 0, manifest)

    def push(self, rank: int, step: int, partition: int = 0, where: tuple[str, int, int] = FRONT, value: float = 1.0) -> None:
        key = PartitionKey(0, step, partition)
        payload = np.full((where[2] - where[1]) // 4, value, np.float32).tobytes()
        self.aggregator.push(rank, key, *where, payload, lambda result: self._keep(rank, key, result))

    def _keep(self, rank: int, key: PartitionKey, result: bytes) -> None:
        self.results.append((rank, key, np.frombuffer(result, np.float32).tolist()))


def test_every_rank_gets_the_average_when_the_last_push_is_in():
    world = World(3)
    world.push(2, 0, value=3.0)
    world.push(0, 0, value=1.0)
    assert world.results == []
    world.push(1, 0, value=5.0)
    assert sorted(world.results) == [(rank, PartitionKey(0, 0, 0), [3.0] * 4) for rank in range(3)]


@pytest.mark.parametrize("arrivals", list(permutations(range(4))))
def test_sums_run_in_the_order_of_ranks_however_they_arrive(arrivals):
    world = World(4)
    for rank in arrivals:
        world.push(rank, 0, value=(1e8, 1.0, -1e8, 3.0)[rank])
    assert {tuple(values) for _, _, values in world.results} == {(0.75,) * 4}  # the 1 is lost beside 1e8


def test_all_ranks_get_the_same_bytes_and_cannot_write_them():
    aggregator = Aggregator(Contributors.all_ranks(2), pytest.fail)
    replies: list[memoryview] = []
    for rank in range(2):
        aggregator.add_group(rank, 7, MANIFEST)
    for rank in range(2):
        aggregator.push(rank, PartitionKey(7, 5, 0), *BACK, np.zeros(4, np.float32).tobytes(), replies.append)
    assert replies[0] is replies[1]
    assert replies[0] == bytes(16)
    assert replies[0].readonly


def test_a_group_that_every_rank_has_released_is_forgotten():
    """Until then, and while an average is outstanding, it stays known."""
    world = World(2)
    rows = Manifest((TensorSpec("rows", (5,), "float64"),), norms=NormsOf(0, 0, (2.0,)))
    for rank in range(2):
        world.aggregator.add_group(rank, 1, rows)
        world.push(rank, 0)
    assert (world.aggregator.measured_by(0), world.aggregator.measured_by(1)) == (None, 0)
    world.aggregator.release(0, [0, 1])
    world.aggregator.release(1, [1])
    assert world.aggregator.measured_by(1) is None
    world.push(1, 1)
    world.aggregator.release(1, [0])
    with pytest.raises(ProtocolError, match="rank 1 released group 1 without announcing the group"):
        world.aggregator.release(1, [1])
    world.push(0, 1)  # an average was outstanding, so the group is known still
    assert len(world.results) == 4
    fresh = World(2)
    for rank in range(2):
        fresh.aggregator.release(rank, [0])
    with pytest.raises(ProtocolError, match="rank 0 pushed step 0 of group 0 without announcing the group"):
        fresh.push(0, 0)


@pytest.mark.parametrize("giver", [0, 1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_average_may_be_made_in_memory_that_a_rank_gave(giver, world_size):
    aggregator = Aggregator(Contributors.all_ranks(world_size), pytest.fail)
    replies: list[memoryview] = []
    for rank in range(world_size):
        aggregator.add_group(rank, 0, MANIFEST)
    payloads = []
    for rank in reversed(range(world_size)):
        payload = aggregator.buffers.take(16)
        payload[:] = np.full(4, (1e8, 1.0, -1e8)[rank], np.float32).tobytes()
        payloads.append(payload)
        aggregator.push(rank, PartitionKey(0, 0, 0), *FRONT, payload, replies.append, given=rank == giver)
    given = payloads[world_size - 1 - giver] if giver < world_size else None
    total = np.float32(1e8) + np.float32(1.0) + (np.float32(-1e8) if world_size == 3 else np.float32(0))
    assert np.frombuffer(replies[0], np.float32).tolist() == [total / np.float32(world_size)] * 4
    assert (given is not None and given.obj is replies[0].obj) == (giver < 2)
    for payload in payloads:
        assert payload is given or payload == np.full(4, np.frombuffer(payload, np.float32)[0], np.float32).tobytes()


def test_memory_given_by_a_rank_that_is_gone_is_not_used():
    aggregator = Aggregator(Contributors.all_ranks(2), lambda error: None)
    for rank in range(2):
        aggregator.add_group(rank, 0, MANIFEST)
    given = aggregator.buffers.take(16)
    aggregator.push(1, PartitionKey(0, 0, 0), *FRONT, given, pytest.fail, given=True)
    aggregator.abandon(1)
    assert aggregator._contributions._groups[0].unfinished[PartitionKey(0, 0, 0)].given is None


def test_a_second_push_of_one_rank_is_refused():
    world = World(2)
    world.push(1, 4, 3)
    with pytest.raises(ProtocolError, match=r"rank 1 pushed partition 3 of step 4, tensor 'embedding', twice"):
        world.push(1, 4, 3)


def test_a_push_for_a_finished_key_is_refused():
    world = World(2)
    for rank in range(2):
        world.push(rank, 0)
    with pytest.raises(ProtocolError, match=r"rank 0 pushed partition 0 of step 0, tensor 'embedding', twice"):
        world.push(0, 0)
    assert len(world.results) == 2


def test_a_push_for_a_step_that_is_over_is_refused():
    world = World(2)
    for step in range(3):
        for rank in range(2):
            world.push(rank, step)
    with pytest.raises(ProtocolError, match=r"rank 1 pushed partition 0 of step 1, .* after step 2: that step is finished"):
        world.push(1, 1)


def test_a_rank_that_skips_a_step_that_others_are_in_is_named():
    world = World(2)
    world.push(0, 30, 1, BACK)
    with pytest.raises(ProtocolError, match=r"rank 1 pushed step 31 but skipped partition 1 of step 30, tensor 'head'"):
        world.push(1, 31)


def test_a_rank_that_skipped_a_step_before_others_came_to_it_is_named():
    world = World(2)
    world.push(1, 31)
    with pytest.raises(ProtocolError, match=r"rank 1 pushed step 31 but skipped partition 0 of step 30, .*rank 0 pushed"):
        world.push(0, 30)


def test_a_rank_may_not_begin_a_step_before_the_last_is_averaged():
    world = World(2)
    world.push(0, 0)
    with pytest.raises(ProtocolError, match=r"rank 0 pushed step 1 before partition 0 of step 0, .* was averaged"):
        world.push(0, 1)


def test_ranks_must_agree_on_the_range_of_a_key():
    world = World(2)
    world.push(0, 0, 0, FRONT)
    with pytest.raises(ProtocolError, match=r"is float32 bytes 0 to 16 on another rank but float32 bytes 16 to 32 on rank 1"):
        world.push(1, 0, 0, BACK)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (("float64", 0, 8), r"float64 bytes 0 to 8 of step 2, but that buffer has 0 bytes"),
        (("int4", 0, 8), r"int4 bytes 0 to 8 of step 2, but that buffer has 0 bytes"),
        (("float32", 16, 36), r"float32 bytes 16 to 36 of step 2, but that buffer has 32 bytes"),
        (("float32", 8, 8), r"float32 bytes 8 to 8"),
        (("float32", 16, 8), r"float32 bytes 16 to 8"),
        (("float32", -4, 8), r"float32 bytes -4 to 8"),
        (("float32", 2, 8), r"'embedding', not on element borders"),
        (("float32", 16, 32), r"rank 1 pushed float32 bytes 16 to 32 of step 2, tensor 'head', with 3 bytes of payload"),
    ],
)
def test_a_push_outside_the_manifest_is_refused(where, message):
    world = World(2)
    with pytest.raises(ProtocolError, match=message):
        world.aggregator.push(1, PartitionKey(0, 2, 0), *where, b"abc", lambda result: None)
    world.push(0, 2)  # and leaves nothing behind
    world.push(1, 2)
    assert len(world.results) == 2


def test_a_range_can_be_refused_before_its_payload_is_there():
    world = World(2)
    world.aggregator.require_fitting(1, PartitionKey(0, 2, 0), *BACK)
    with pytest.raises(ProtocolError, match=r"float32 bytes 16 to 36 of step 2, but that buffer has 32 bytes"):
        world.aggregator.require_fitting(1, PartitionKey(0, 2, 0), "float32", 16, 36)
    with pytest.raises(ProtocolError, match="rank 1 pushed step 0 of group 3 without announcing the group"):
        world.aggregator.require_fitting(1, PartitionKey(3, 0, 0), *FRONT)


def test_a_group_must_be_announced_by_the_rank_that_pushes():
    world = World(2)
    world.aggregator.add_group(0, 1, MANIFEST)
    with pytest.raises(ProtocolError, match="rank 1 pushed step 0 of group 1 without announcing the group"):
        world.aggregator.push(1, PartitionKey(1, 0, 0), *FRONT, bytes(16), lambda result: None)


def test_a_group_is_announced_once_per_rank():
    world = World(2)
    with pytest.raises(ProtocolError, match="rank 1 announced group 0 twice"):
        world.aggregator.add_group(1, 0, MANIFEST)


def test_ranks_must_announce_equal_manifests():
    aggregator = Aggregator(Contributors.all_ranks(2), pytest.fail)
    aggregator.add_group(1, 0, MANIFEST)
    other = Manifest((MANIFEST.tensors[0], TensorSpec("head", (5,), "float32")))
    with pytest.raises(ManifestMismatch, match=r"tensor 1 is 'head' float32\[4\] on rank 1 but 'head' float32\[5\] on rank 0"):
        aggregator.add_group(0, 0, other)
    with pytest.raises(ManifestMismatch, match="rank 1 has 2 tensors, rank 0 has 1"):
        aggregator.add_group(0, 0, Manifest(MANIFEST.tensors[:1]))


def test_what_waits_for_a_rank_that_leaves_fails():
    world = World(2)
    for rank in range(2):
        world.push(rank, 30)
    world.push(1, 31, 1, BACK)
    world.aggregator.leave(0)
    assert [str(error) for error in world.failures] == [
        f"rank 0 left after step 30; the average of tensor 'head' of step 31 waits for it{FEWER_BATCHES}"
    ]
    assert isinstance(world.failures[0], PeerLost)


def test_a_rank_that_leaves_with_nothing_open_fails_only_who_comes_to_need_it():
    world = World(2)
    world.aggregator.leave(0)
    world.aggregator.leave(0)
    assert world.failures == []
    with pytest.raises(PeerLost, match=r"rank 0 left before its first step; the average of tensor 'embedding' of step 0 waits"):
        world.push(1, 0)


def test_what_a_rank_pushed_before_it_left_still_counts():
    world = World(2)
    world.push(0, 0, value=1.0)
    world.aggregator.leave(0)
    world.push(1, 0, value=3.0)
    assert [result[2] for result in world.results] == [[2.0] * 4] * 2


def test_what_a_rank_pushed_before_it_abandoned_does_not():
    world = World(2)
    world.push(0, 0, value=1.0)
    world.aggregator.abandon(0)
    assert "rank 0 left after step 0; the average of tensor 'embedding' of step 0 waits for it" in str(world.failures[0])
    with pytest.raises(PeerLost, match="rank 0 left"):
        world.push(1, 0, value=3.0)
    assert world.results == []


def test_after_close_pushes_are_ignored():
    world = World(1)
    world.aggregator.close()
    world.push(0, 0)
    assert world.results == []


def test_a_key_may_mean_another_range_after_the_plan_was_cut_anew():
    world = World(2)
    for step, ranges in enumerate([[FRONT, BACK], [("float32", 0, 32)], [FRONT, BACK], [("float32", 0, 32)]]):
        for partition, where in enumerate(ranges):
            for rank in range(2):
                world.push(rank, step, partition, where, value=step)
    assert [values for _, _, values in world.results[::2]] == [[0.0] * 4, [0.0] * 4, [1.0] * 8, [2.0] * 4, [2.0] * 4, [3.0] * 8]


@settings(max_examples=50)
@given(st.data())
def test_any_interleaving_of_ranks_gives_exact_results_and_refuses_duplicates(data):
    world_size, steps, partitions = data.draw(st.integers(1, 4)), 4, 2
    world = World(world_size)
    # What each rank still has to push: steps in order, partitions of a step in any order.
    plans = {
        rank: deque((step, p) for step in range(steps) for p in data.draw(st.permutations(range(partitions))))
        for rank in range(world_size)
    }
    pushed: list[tuple[int, int, int]] = []
    while any(plans.values()):
        finished = len(world.results) // world_size
        able = [rank for rank, plan in plans.items() if plan and plan[0][0] * partitions <= finished]
        rank = data.draw(st.sampled_from(able))
        step, partition = plans[rank].popleft()
        world.push(rank, step, partition, (FRONT, BACK)[partition], value=10 * step + rank)
        pushed.append((rank, step, partition))
        again = data.draw(st.sampled_from(pushed))
        with pytest.raises(ProtocolError, match=rf"rank {again[0]} pushed partition {again[2]} of step {again[1]}, "):
            world.push(*again, (FRONT, BACK)[again[2]])
    mean = np.float32(sum(range(world_size))) / np.float32(world_size)
    assert len(world.results) == world_size * steps * partitions
    for _, key, values in world.results:
        assert values == pytest.approx([10 * key.step + mean] * 4, rel=1e-6)
    assert not world.failures


def test_threads_that_push_the_same_partitions_in_any_order_get_every_average_once():
    world_size, steps = 3, 30
    partitions = 16
    manifest = Manifest((TensorSpec("x", (partitions,), "float64"),))
    aggregator = Aggregator(Contributors.all_ranks(world_size), pytest.fail)
    for rank in range(world_size):
        aggregator.add_group(rank, 0, manifest)

    def body(rank: int) -> None:
        chance = random.Random(rank)
        replies: SimpleQueue[tuple[int, int, bytes]] = SimpleQueue()
        for step in range(steps):
            for partition in chance.sample(range(partitions), partitions):
                payload = np.float64(step * 100 + partition + rank - 1).tobytes()
                where = ("float64", partition * 8, partition * 8 + 8)
                aggregator.push(
                    rank, PartitionKey(0, step, partition), *where, payload,
                    lambda result, at=(step, partition): replies.put((*at, result)),
                )  # fmt: skip
            got = sorted(replies.get(timeout=60) for _ in range(partitions))
            assert got == [(step, p, np.float64(step * 100 + p).tobytes()) for p in range(partitions)]
            assert replies.empty()

    run_world(world_size, body)


def test_ten_thousand_rounds_with_a_slow_rank_that_reads_late_are_all_exact():
    """A rank that has its average pushes again at once; the slow one looks at each only after three more were made."""
    rounds, late = 10_000, 3
    aggregator = Aggregator(Contributors.all_ranks(2), pytest.fail)
    manifest = Manifest((TensorSpec("weight", (2,), "float64"),))
    for rank in range(2):
        aggregator.add_group(rank, 0, manifest)

    def body(rank: int) -> int:
        wrong = 0
        unread: deque[tuple[int, bytes]] = deque()
        arrived: SimpleQueue[bytes] = SimpleQueue()
        payload = np.zeros(2)
        for step in range(rounds):
            payload[:] = (step + (-1) ** rank, 2 * step + 3 * (-1) ** rank)
            aggregator.push(rank, PartitionKey(0, step, 0), "float64", 0, 16, payload.data, arrived.put)
            unread.append((step, arrived.get(timeout=60)))
            if rank == 1 and step % 1_000 == 0:
                threading.Event().wait(0.002)
            while len(unread) > (late if rank == 1 else 0):
                expected, result = unread.popleft()
                wrong += tuple(np.frombuffer(result)) != (expected, 2 * expected)
        return wrong

    assert run_world(2, body, timeout_seconds=300) == [0, 0]


def test_memory_does_not_grow_with_the_number_of_rounds():
    world = World(2)

    def rounds(steps: range) -> None:
        for step in steps:
            for rank in range(2):
                world.push(rank, step)
        world.results.clear()

    rounds(range(100))
    gc.collect()
    tracemalloc.start()
    try:
        rounds(range(100, 1100))
        gc.collect()
        kept = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    # Not what threads of other tests have allocated meanwhile.
    ours = [tracemalloc.Filter(True, f"{Path(inspect.getfile(Aggregator)).parent}/*"), tracemalloc.Filter(True, __file__)]
    assert sum(trace.size for trace in kept.filter_traces(ours).traces) < 10_000  # 10 bytes for each round


def test_ranks_are_called_by_their_place_in_the_job_and_sums_divided_by_its_size():
    failures: list[CommschedError] = []
    results: list[memoryview] = []
    aggregator = Aggregator(Contributors((3, 7), 8), failures.append)
    aggregator.add_group(0, 0, MANIFEST)
    with pytest.raises(ProtocolError, match="rank 7 pushed step 0 of group 0 without announcing the group"):
        aggregator.push(1, PartitionKey(0, 0, 0), *FRONT, bytes(16), results.append)
    with pytest.raises(ManifestMismatch, match=r"rank 3 has 2 tensors, rank 7 has 0"):
        aggregator.add_group(1, 0, Manifest(()))
    aggregator.add_group(1, 0, MANIFEST)
    for rank in range(2):
        aggregator.push(rank, PartitionKey(0, 0, 0), *FRONT, np.full(4, 12.0, np.float32).tobytes(), results.append)
    assert np.frombuffer(results[0], np.float32).tolist() == [3.0] * 4
    aggregator.push(0, PartitionKey(0, 1, 0), *FRONT, bytes(16), results.append)
    aggregator.leave(1)
    waiting = "the average of tensor 'embedding' of step 1"
    assert str(failures[0]) == f"rank 7 left after step 0; {waiting} waits for it{FEWER_BATCHES}"
