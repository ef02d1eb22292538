"""Exchanges of gradients in virtual time: the parameter servers of the ps transport."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from ..core.policies import make_policy
from ..core.scheduler import Scheduler, SchedulerConfig
from ..core.task import CommTask
from .clock import EndOfInstant, VirtualClock
from .network import SimulatedNetwork
from .network_sharing import FairShareCache
from .scenario import Cluster, OnDone, OnNorm

#: The order of the messages of a norm: before all partitions.
_MOST_URGENT = -1


def _nothing() -> None:
    """Do nothing."""


class ParameterServers:
    """The parameter server, in virtual time. It reports each complete average through ``on_done``.

    A push goes over the network unless the shard is on the rank's own host. Credit
    comes back when the bytes of the push have left, as over TCP; over gRPC it comes back two latencies later. When the pushes
    of all ranks have arrived, the shard sends a reply to each rank.

    Args:
        on_norm: if given, each rank asks every shard for its part of the norm when all pushes of the step have left. A shard
            answers when all ranks have asked, because connections keep the order of messages, so that it has summed everything
            by then. These messages are the most urgent ones. ``on_norm`` is called when all answers have arrived.
        partitions: number of partitions of a step.
    """

    def __init__(
        self,
        clock: VirtualClock,
        cluster: Cluster,
        shares: FairShareCache,
        config: SchedulerConfig,
        on_done: OnDone,
        on_norm: OnNorm | None,
        partitions: int,
    ) -> None:
        self._clock = clock
        self._on_done = on_done
        self._network = SimulatedNetwork(clock, cluster, shares)
        workers = range(len(cluster.workers))
        self._schedulers: Sequence[Scheduler[CommTask]] = [
            Scheduler(make_policy(config.policy), config.credit_bytes) for _ in workers
        ]
        self._start_soon = [EndOfInstant(clock, partial(self._start, worker)) for worker in workers]
        self._pushed: dict[tuple[int, int], list[CommTask | None]] = {}  # (step, partition) -> the push of each class
        self._on_norm = on_norm
        self._partitions = partitions
        self._left = [0] * len(self._schedulers)  # by worker class: number of pushes of its step that have left
        self._asked: Counter[tuple[int, int]] = Counter()  # (step, shard) -> number of classes that asked for the norm
        self._answers: Counter[tuple[int, int]] = Counter()  # (worker, step) -> number of shards that answered

    def ready(self, worker: int, task: CommTask) -> None:
        """Submit ``task``: its gradients are written on the worker class with index ``worker``."""
        task.ready_at = self._clock.now
        task.order = self._schedulers[worker].add(task)
        self._start_soon[worker]()

    def _start(self, worker: int) -> None:
        while (task := self._schedulers[worker].next()) is not None:
            task.started_at = self._clock.now
            shard = task.partition.server
            if self._network.members_across(worker, shard) == 0:
                self._sent(worker, task)
                self._arrived(worker, shard, task)
            else:
                left, arrived = partial(self._sent, worker, task), partial(self._arrived, worker, shard, task)
                self._network.push(worker, shard, task.order, task.nbytes, left, arrived)

    def _sent(self, worker: int, task: CommTask) -> None:
        task.sent_at = self._clock.now
        self._schedulers[worker].sent(task)
        self._start_soon[worker]()
        self._left[worker] += 1
        if self._on_norm is not None and self._left[worker] == self._partitions:
            self._left[worker] = 0
            for shard in range(self._network.shards):
                asked = partial(self._norm_asked, task.step, shard)
                if self._network.members_across(worker, shard) == 0:
                    asked()
                else:
                    self._network.push(worker, shard, _MOST_URGENT, 0, _nothing, asked)

    def _norm_asked(self, step: int, shard: int) -> None:
        self._asked[step, shard] += 1
        if self._asked[step, shard] < len(self._schedulers):
            return
        del self._asked[step, shard]
        for worker in range(len(self._schedulers)):
            answered = partial(self._norm_answered, worker, step)
            if self._network.members_across(worker, shard) == 0:
                answered()
            else:
                self._network.reply(worker, shard, _MOST_URGENT, 0, answered)

    def _norm_answered(self, worker: int, step: int) -> None:
        self._answers[worker, step] += 1
        if self._answers[worker, step] == self._network.shards:
            del self._answers[worker, step]
            assert self._on_norm is not None
            self._on_norm(worker, step)

    def _arrived(self, worker: int, shard: int, task: CommTask) -> None:
        key = task.step, task.partition.index
        pushes = self._pushed.setdefault(key, [None] * len(self._schedulers))
        pushes[worker] = task
        if None in pushes:
            return
        del self._pushed[key]
        for each, push in enumerate(pushes):
            assert push is not None
            done = partial(self._on_done, each, *key)
            if self._network.members_across(each, shard) == 0:
                done()
            else:
                self._network.reply(each, shard, push.order, push.nbytes, done)
