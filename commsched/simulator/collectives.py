"""Collectives in virtual time: one network that averages one partition after another."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from ..core.config import SchedulerConfig
from ..core.policies import make_policy
from ..core.scheduler import Scheduler
from ..core.task import CommTask
from .clock import EndOfInstant, VirtualClock
from .scenario import Cluster, OnDone, bytes_factor


def hops(workers: int) -> int:
    """Return the number of consecutive messages of an all-reduce that moves the fewest bytes.

    It is a ring, or halving and doubling if that needs fewer messages.
    """
    return min(2 * (workers - 1), 2 * math.ceil(math.log2(workers))) if workers > 1 else 0


class _Link:
    """A link that serves one transfer after another, in the order of the requests."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._busy = False

    def put(self, seconds: float, ended: Callable[[], None]) -> None:
        self._waiting.append((seconds, ended))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            seconds, ended = self._waiting.popleft()
            self._clock.call_at(self._clock.now + seconds, partial(self._end, ended))

    def _end(self, ended: Callable[[], None]) -> None:
        ended()
        self._next()


class AllReduce:
    """An ``ExchangeModel`` with one order for all ranks: a task may start when it is ready on the last rank.

    An all-reduce takes ``message_seconds + hops * latency + 2 (n - 1) / n * bytes / rate``, where ``rate`` is the rate of the
    slowest NIC. Once the credit lets a task start, its place in the order is fixed. All-reduces run one after another.
    """

    def __init__(self, clock: VirtualClock, cluster: Cluster, config: SchedulerConfig, on_done: OnDone) -> None:
        self._clock = clock
        self._workers = len(cluster.workers)
        self._on_done = on_done
        self._scheduler: Scheduler[CommTask] = Scheduler(make_policy(config.policy), config.credit_bytes)
        self._link = _Link(clock)
        self._overhead_seconds = cluster.message_seconds + hops(cluster.world_size) * cluster.latency_seconds
        self._seconds_per_byte = bytes_factor(cluster.world_size) / cluster.slowest_rate
        self._ready: Counter[tuple[int, int]] = Counter()
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
            self._link.put(self._seconds(task), partial(self._reduced, task))

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
                self._link.put(self._seconds(each), partial(super()._finish, each))
            self._scattered.clear()
