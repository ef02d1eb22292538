"""A policy's order reaches the wire: from the core's tasks to the pushes of a worker, and to the replies of its server."""

import threading
from contextlib import closing
from queue import SimpleQueue

import pytest

from commsched.core.core import Core
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.scheduler import SchedulerConfig
from commsched.transports.backends.ps.right_of_way import RightOfWay
from commsched.transports.backends.ps.service import Service
from commsched.transports.backends.ps.transport import PsTransport

from ...worlds import a_context, a_shard, open_ps

MANIFEST = Manifest(tuple(TensorSpec(f"layer{index}", (16,), "uint8") for index in range(4)))
BACKWARD = (3, 2, 1, 0)


class Watched:
    """One worker, its server, and what passes between them: partitions in the order in which they come."""

    def __init__(self, lane: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: SimpleQueue[int] = SimpleQueue()
        self.pushed: SimpleQueue[int] = SimpleQueue()
        self.averaged: SimpleQueue[int] = SimpleQueue()
        for owner, name, queue, partition in (
            (PsTransport, "start", self.started, lambda task, completion: task.partition.index),
            (Service, "_push", self.pushed, lambda worker, rank, frame: frame.partition),
            (PsTransport, "on_result", self.averaged, lambda server, frame: frame.partition),
        ):
            monkeypatch.setattr(owner, name, self._noting(getattr(owner, name), queue, partition))
        self._shard = a_shard(1, pytest.fail, lane=lane)
        self._transport = open_ps(a_context(0, 1, pytest.fail, lane=lane), [self._shard.address])
        self._core = Core(self._transport, SchedulerConfig(16, 1000, policy))
        self.group = self._core.add_group(cut(MANIFEST, 16), {"uint8": memoryview(bytearray(64))})
        #: While a reply of an earlier step, or a push, is to leave, pushes or replies wait in their outbox.
        self.pushes_wait = RightOfWay()
        self._transport._lanes[0]._outbox.yield_to(self.pushes_wait)
        self.replies_wait = self._shard.service.right_of_way

    @staticmethod
    def _noting(original, queue, partition):
        def noting(self, *arguments):
            original(self, *arguments)
            queue.put(partition(*arguments))

        return noting

    def way_is_free(self) -> None:
        """It has nothing that waits."""

    def close(self) -> None:
        self._core.close()
        self._transport.close()
        self._shard.close()


def next_four(queue: SimpleQueue[int]) -> list[int]:
    return [queue.get(timeout=60) for _ in range(4)]


@pytest.mark.parametrize("lane", ["tcp", "grpc"])
@pytest.mark.parametrize(("policy", "order"), [("priority", [0, 1, 2, 3]), ("fifo", [3, 2, 1, 0])])
def test_pushes_and_replies_that_wait_leave_in_the_order_of_the_policy(lane, policy, order, monkeypatch):
    with closing(Watched(lane, policy, monkeypatch)) as worker:
        worker.pushes_wait.reply_begins(worker, (0, -1), 1)
        worker.group.begin_step()
        for tensor in BACKWARD:
            worker.group.notify_ready(tensor)
            assert worker.started.get(timeout=60) == tensor  # the credit is no limit: the outbox decides
        worker.pushes_wait.reply_left(worker, (0, -1), 1)
        assert next_four(worker.pushed) == order
        assert sorted(next_four(worker.averaged)) == [0, 1, 2, 3]

        worker.replies_wait.push_begins((0, 1))
        worker.group.begin_step()
        for tensor in BACKWARD:
            worker.group.notify_ready(tensor)
            assert worker.pushed.get(timeout=60) == tensor  # alone, and its reply is queued
        worker.replies_wait.push_left()
        assert next_four(worker.averaged) == order
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("commsched-lane-")]
