"""Exchanges of gradients in virtual time: the parameter servers of the ps transport, and collectives, one after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from ..core.plan import place
from ..core.policies import make_policy
from ..core.scheduler import Scheduler, SchedulerConfig
from ..core.task import CommTask
from .clock import EndOfInstant, VirtualClock
from .network import SimulatedNetwork
from .network_sharing import FairShareCache
from .scenario import Cluster, OnDone, bytes_factor


class ParameterServers:
    """The parameter server, in virtual time. It reports each complete average through ``on_done``.

    ``place`` chooses the shard of a partition. A push goes over the network unless the shard is on the rank's own host. Credit
    comes back when the bytes of the push have left, as over TCP; over gRPC it comes back two latencies later. When the pushes
    of all ranks have arrived, the shard sends a reply to each rank.
    """

    def __init__(
        self, clock: VirtualClock, cluster: Cluster, shares: FairShareCache, config: SchedulerConfig, on_done: OnDone
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

    def ready(self, worker: int, task: CommTask) -> None:
        """Submit ``task``: its gradients are written on the worker class with index ``worker``."""
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
                left, arrived = partial(self._sent, worker, task), partial(self._arrived, worker, shard, task)
                self._network.push(worker, shard, task.order, task.nbytes, left, arrived)

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


def hops(workers: int) -> int:
    """Return the number of consecutive messages of an all-reduce that moves the fewest bytes.

    It is a ring, or halving and doubling if that needs fewer messages.
    """
    return min(2 * (workers - 1), 2 * math.ceil(math.log2(workers))) if workers > 1 else 0


class AllReduce:
    """Collectives with one order for all ranks: a task may start when it is ready on the last rank.

    An all-reduce takes ``message_seconds + hops * latency + 2 (n - 1) / n * bytes / rate``, where ``rate`` is the rate of the
    slowest NIC. Once the credit lets a task start, its place in the order is fixed. All-reduces run one after another.
    """

    def __init__(self, clock: VirtualClock, cluster: Cluster, config: SchedulerConfig, on_done: OnDone) -> None:
        self._clock = clock
        self._workers = len(cluster.workers)
        self._on_done = on_done
        self._scheduler: Scheduler[CommTask] = Scheduler(make_policy(config.policy), config.credit_bytes)
        self._free_at = 0.0  # the time at which the network has done all that was asked of it
        self._overhead_seconds = cluster.message_seconds + hops(cluster.world_size) * cluster.latency_seconds
        slowest_rate = min(each.rate_bytes_per_second for each in cluster.workers)
        self._seconds_per_byte = bytes_factor(cluster.world_size) / slowest_rate
        self._tasks: dict[tuple[int, int], list[CommTask]] = {}
        self._start_soon = EndOfInstant(clock, self._start)

    def ready(self, worker: int, task: CommTask) -> None:
        task.ready_at = self._clock.now
        tasks = self._tasks.setdefault((task.step, task.partition.index), [])
        tasks.append(task)
        if len(tasks) == self._workers:
            self._scheduler.add(tasks[0])
            self._start_soon()

    def _start(self) -> None:
        while (task := self._scheduler.next()) is not None:
            self._stamp(task, "started_at")
            self._transfer(self._seconds(task), partial(self._reduced, task))

    def _transfer(self, seconds: float, ended: Callable[[], None]) -> None:
        """Occupy the network for ``seconds``, after all transfers before."""
        self._free_at = max(self._free_at, self._clock.now) + seconds
        self._clock.call_at(self._free_at, ended)

    def _seconds(self, task: CommTask) -> float:
        return self._overhead_seconds + self._seconds_per_byte * task.nbytes

    def _reduced(self, task: CommTask) -> None:
        self._scheduler.sent(task)
        self._start_soon()
        self._finish(task)

    def _finish(self, task: CommTask) -> None:
        """Report to every worker class that the average is complete."""
        key = task.step, task.partition.index
        del self._tasks[key]
        for worker in range(self._workers):
            self._on_done(worker, *key)

    def _stamp(self, task: CommTask, what: str) -> None:
        for each in self._tasks[task.step, task.partition.index]:
            setattr(each, what, self._clock.now)


class SimulatedReduceScatterAllGather(AllReduce):
    """DeAR: the reduce-scatters are ordered like all-reduces; the all-gathers follow the last reduce-scatter of the step.

    A reduce-scatter and an all-gather each take half the time of an all-reduce, but its whole ``message_seconds``.

    Args:
        partitions: number of partitions of a step.
    """

    def __init__(
        self, clock: VirtualClock, cluster: Cluster, config: SchedulerConfig, on_done: OnDone, partitions: int
    ) -> None:
        super().__init__(clock, cluster, config, on_done)
        self._partitions = partitions
        self._overhead_seconds = cluster.message_seconds + hops(cluster.world_size) * cluster.latency_seconds / 2
        self._seconds_per_byte /= 2
        self._scattered: list[CommTask] = []

    def _finish(self, task: CommTask) -> None:
        self._scattered.append(task)
        if len(self._scattered) == self._partitions:
            for each in sorted(self._scattered, key=lambda task: task.priority):
                self._transfer(self._seconds(each), partial(super()._finish, each))
            self._scattered.clear()
