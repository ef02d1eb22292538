"""Ranks that are threads of one process."""

import numpy as np
import pytest

from commsched.core.errors import FEWER_BATCHES, ClosedError, CommschedError, ConfigError, PeerLost
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import Partition
from commsched.core.task import CommTask
from commsched.testing.check_transport import check_back_to_back, check_transport
from commsched.testing.checked_world import Threads
from commsched.transports.backends.local import LocalTransport, LocalWorld

from ..worlds import local_world

MANIFEST = Manifest((TensorSpec("weight", (2,), "float32"),))


class Events(list):
    """A Completion that writes down what it is told."""

    def on_sent(self, task: CommTask) -> None:
        self.append(("sent", task.step))

    def on_done(self, task: CommTask) -> None:
        self.append(("done", task.step))


def make_task(values: list[float], step: int = 0) -> CommTask:
    data = memoryview(bytearray(np.array(values, np.float32).tobytes()))
    return CommTask(0, step, Partition(0, "float32", 0, 8, (0,)), data)


def opened(size: int) -> tuple[LocalWorld, list[LocalTransport], list[list[CommschedError]]]:
    world = LocalWorld(size)
    failures: list[list[CommschedError]] = [[] for _ in range(size)]
    transports = [world.transport(rank, failures[rank].append) for rank in range(size)]
    for transport in transports:
        transport.add_group(0, MANIFEST)
    return world, transports, failures


def test_conformance():
    check_transport(local_world, rounds=60)


def test_many_rounds_with_a_slow_rank():
    check_back_to_back(lambda: Threads(local_world, 3), 2_000)


def test_credit_comes_back_before_the_other_rank_has_started():
    _, transports, _ = opened(2)
    events, mine, theirs = Events(), make_task([1, 2]), make_task([3, 6])
    transports[0].start(mine, events)
    assert events == [("sent", 0)]
    transports[1].start(theirs, Events())
    assert events == [("sent", 0), ("done", 0)]
    assert bytes(mine.data) == bytes(theirs.data) == np.array([2, 4], np.float32).tobytes()


def test_a_broken_rule_is_told_to_every_rank():
    _, transports, failures = opened(2)
    transports[0].start(make_task([1, 2]), Events())
    transports[0].start(make_task([1, 2]), Events())
    for told in failures:
        assert [str(error) for error in told] == ["rank 0 pushed partition 0 of step 0, tensor 'weight', twice"]


def test_a_rank_that_closes_is_lost_to_those_who_wait_and_its_buffer_is_left_alone():
    _, transports, failures = opened(2)
    task, events = make_task([1, 2]), Events()
    transports[0].start(task, events)
    transports[0].close()
    transports[1].start(make_task([3, 4]), Events())
    assert failures[0] == []
    assert isinstance(failures[1][0], PeerLost)
    waiting = "the average of tensor 'weight' of step 0"
    assert str(failures[1][0]) == f"rank 0 left after step 0; {waiting} waits for it{FEWER_BATCHES}"
    assert bytes(task.data) == np.array([1, 2], np.float32).tobytes()
    assert events == [("sent", 0)]


def test_a_closed_transport_starts_nothing():
    _, transports, _ = opened(1)
    transports[0].close()
    with pytest.raises(ClosedError, match="this transport is closed"):
        transports[0].start(make_task([1, 2]), Events())


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_each_rank_exists_once(rank):
    world = LocalWorld(2)
    world.transport(0, lambda error: None)
    with pytest.raises(ConfigError, match=rf"rank {rank} is taken, or not below the world size of 2"):
        world.transport(rank, lambda error: None)
