"""The ps transport in virtual time: each class's own Scheduler, shards that average, replies in order of priority."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..core.config import SchedulerConfig
from ..core.placement import place
from ..core.policies import make_policy
from ..core.scheduler import Scheduler
from ..core.task import CommTask
from .clock import VirtualClock
from .exchange import OnDone
from .network import Network
from .scenario import Cluster
from .shares import Shares
from .soon import Soon


class ParameterServers:
    """See ``ExchangeModel``.

    A partition lives on the shard that ``place`` says. Its push goes over the network unless the shard is the rank's own;
    credit is back when the push has arrived and the answer to it, which weighs nothing, too, as over gRPC; over TCP the library
    has it back earlier, by two latencies and what the kernel holds, 64 KB, and that is not modelled. When all ranks' pushes
    are there, each gets its reply.
    """

    def __init__(self, clock: VirtualClock, cluster: Cluster, shares: Shares, config: SchedulerConfig, on_done: OnDone) -> None:
        self._clock = clock
        self._cluster = cluster
        self._on_done = on_done
        self._network = Network(clock, cluster, shares)
        workers = range(len(cluster.workers))
        self._schedulers: Sequence[Scheduler[CommTask]] = [
            Scheduler(make_policy(config.policy), config.credit_bytes) for _ in workers
        ]
        self._start_soon = [Soon(clock, partial(self._start, worker)) for worker in workers]
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
