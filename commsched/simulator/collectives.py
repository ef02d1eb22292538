"""Exchanges of gradients in virtual time: collectives, one after another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..core.policies import make_policy
from ..core.scheduler import Scheduler, SchedulerConfig
from ..core.task import CommTask
from .clock import EndOfInstant, VirtualClock
from .scenario import Cluster, OnDone, OnNorm, bytes_factor


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
            self._ready_everywhere(tasks[0])

    def _ready_everywhere(self, task: CommTask) -> None:
        self._scheduler.add(task)
        self._start_soon()

    def _start(self) -> None:
        while (task := self._scheduler.next()) is not None:
            self._stamp(task, "started_at")
            self._transfer(self._seconds(task.nbytes), partial(self._reduced, task))

    def _transfer(self, seconds: float, ended: Callable[[], None]) -> None:
        """Occupy the network for ``seconds``, after all transfers before."""
        self._free_at = max(self._free_at, self._clock.now) + seconds
        self._clock.call_at(self._free_at, ended)

    def _seconds(self, nbytes: int) -> float:
        return self._overhead_seconds + self._seconds_per_byte * nbytes

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
                self._transfer(self._seconds(each.nbytes), partial(super()._finish, each))
            self._scattered.clear()


@dataclass(slots=True, eq=False)
class _Collective:
    """A collective of :class:`Split`, and what happens when it ends."""

    priority: int
    nbytes: int
    ended: Callable[[], None]
    task: CommTask | None = None  # whose exchange begins with this collective


class Split(AllReduce):
    """Two collectives for each partition, as with ``collective=rsag``: its all-gather becomes ready when its reduce-scatter has
    ended. All are in one order, and each takes half the time of an all-reduce, but its whole ``message_seconds``.

    Args:
        on_norm: if given, every all-gather is less urgent than every reduce-scatter. After the last reduce-scatter of a step, a
            small all-gather, the most urgent one, brings the norm; then ``on_norm`` is called for each worker class.
        partitions: number of partitions of a step.
    """

    def __init__(
        self,
        clock: VirtualClock,
        cluster: Cluster,
        config: SchedulerConfig,
        on_done: OnDone,
        on_norm: OnNorm | None,
        partitions: int,
    ) -> None:
        super().__init__(clock, cluster, config, on_done)
        self._on_norm = on_norm
        self._partitions = partitions
        self._overhead_seconds = cluster.message_seconds + hops(cluster.world_size) * cluster.latency_seconds / 2
        self._seconds_per_byte /= 2
        self._collectives: Scheduler[_Collective] = Scheduler(make_policy(config.policy), config.credit_bytes)
        self._scattered = 0

    def _ready_everywhere(self, task: CommTask) -> None:
        self._add(_Collective(task.priority, task.nbytes, partial(self._reduce_scattered, task), task))

    def _add(self, collective: _Collective) -> None:
        self._collectives.add(collective)
        self._start_soon()

    def _start(self) -> None:
        while (collective := self._collectives.next()) is not None:
            if collective.task is not None:
                self._stamp(collective.task, "started_at")
            self._transfer(self._seconds(collective.nbytes), partial(self._ended, collective))

    def _ended(self, collective: _Collective) -> None:
        self._collectives.sent(collective)
        self._start_soon()
        collective.ended()

    def _reduce_scattered(self, task: CommTask) -> None:
        behind = 0 if self._on_norm is None else self._partitions
        self._add(_Collective(behind + task.priority, task.nbytes, partial(self._finish, task)))
        self._scattered += 1
        if self._scattered == self._partitions:
            self._scattered = 0
            if self._on_norm is not None:
                self._add(_Collective(-1, 0, partial(self._normed, self._on_norm, task.step)))

    def _normed(self, on_norm: OnNorm, step: int) -> None:
        for worker in range(self._workers):
            on_norm(worker, step)
