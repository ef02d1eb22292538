"""The ps transport in virtual time: one Scheduler per worker class, shards that average, replies in order of priority."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..core.config import SchedulerConfig
from ..core.plan import place
from ..core.policies import make_policy
from ..core.scheduler import Scheduler
from ..core.task import CommTask
from .clock import EndOfInstant, VirtualClock
from .network import SimulatedNetwork
from .network_sharing import FairShareCache
from .scenario import Cluster, OnDone


class ParameterServers:
    """An ``ExchangeModel`` of the parameter server.

    ``place`` chooses the shard of a partition. A push goes over the network unless the shard is on the rank's own host. Credit
    comes back when the acknowledgement of the push arrives, as over gRPC; the acknowledgement takes one latency and no
    bandwidth. Over TCP the library gets the credit back earlier, by two latencies and by the 64 KB that the kernel buffers.
    This is not modelled. When the pushes of all ranks have arrived, the shard sends a reply to each rank.
    """

    def __init__(
        self, clock: VirtualClock, cluster: Cluster, shares: FairShareCache, config: SchedulerConfig, on_done: OnDone
    ) -> None:
        self._clock = clock
        self._cluster = cluster
        self._on_done = on_done
        self._network = SimulatedNetwork(clock, cluster, shares)
        workers = range(len(cluster.workers))
        self._schedulers: Sequence[Scheduler[CommTask]] = [
            Scheduler(make_policy(config.policy), config.credit_bytes) for _ in workers
        ]
        self._start_soon = [EndOfInstant(clock, partial(self._start, worker)) for worker in workers]
        self._pushed: dict[tuple[int, int], list[CommTask | None]] = {}  # (step, partition) -> the push of each class

    def ready(self, worker: int, task: CommTask) -> None:
        task.ready_at = self._clock.now
        task.order = self._schedulers[worker].add(task)
        self._start_soon[worker]()

    def _start(self, worker: int) -> None:
        while (task := self._schedulers[worker].next()) is not None:
            task.started_at = self._clock.now
            shard = place(task.partition.index, self._network.shards)
            if self._network.members_across(worker, shard) == 0:
                self._sent(worker, task)
                self._arrived(worker, shard, task)
            else:
                arrived = partial(self._acknowledge, worker, shard, task)
                self._network.push(worker, shard, task.order, task.nbytes, arrived)

    def _acknowledge(self, worker: int, shard: int, task: CommTask) -> None:
        self._clock.call_at(self._clock.now + self._cluster.latency_seconds, partial(self._sent, worker, task))
        self._arrived(worker, shard, task)

    def _sent(self, worker: int, task: CommTask) -> None:
        task.sent_at = self._clock.now
        self._schedulers[worker].sent(task)
        self._start_soon[worker]()

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
