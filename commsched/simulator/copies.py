"""Copies between devices and hosts in virtual time, around an exchange of gradients: see ``core/staging.py``."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from ..core.policies import make_policy
from ..core.scheduler import Scheduler, SchedulerConfig
from ..core.staging import MAX_BYTES_IN_FLIGHT
from ..core.task import CommTask
from .clock import VirtualClock
from .scenario import Cluster, OnDone


class SimulatedExchange(Protocol):
    """Averages the tasks that are ready on all worker classes."""

    def ready(self, worker: int, task: CommTask) -> None:
        """Submit ``task``: its gradients are written on the worker class with index ``worker``."""


class Copies:
    """An exchange whose gradients and averages lie on devices. A device copies at ``cluster.copy_rate`` in each direction, at
    the same time. Copies to the host take the order of the policy, behind at most ``MAX_BYTES_IN_FLIGHT`` that are queued.
    Copies to the device take the order in which averages arrive.

    ``inner`` averages in the hosts' memory, and reports to :meth:`done`; it is set once it is made.
    """

    inner: SimulatedExchange

    def __init__(self, clock: VirtualClock, cluster: Cluster, config: SchedulerConfig, on_done: OnDone) -> None:
        assert cluster.copy_rate is not None
        self._clock = clock
        self._seconds_per_byte = 1 / cluster.copy_rate
        self._on_done = on_done
        workers = range(len(cluster.workers))
        self._waiting: list[Scheduler[CommTask]] = [Scheduler(make_policy(config.policy), MAX_BYTES_IN_FLIGHT) for _ in workers]
        self._out_free_at, self._back_free_at = [0.0 for _ in workers], [0.0 for _ in workers]
        self._nbytes: dict[int, int] = {}  # by partition

    def ready(self, worker: int, task: CommTask) -> None:
        task.ready_at = self._clock.now
        self._nbytes[task.partition.index] = task.nbytes
        self._waiting[worker].add(task)
        self._copy_out(worker)

    def _copy_out(self, worker: int) -> None:
        while (task := self._waiting[worker].next()) is not None:
            self._out_free_at[worker] = self._copied_at(self._out_free_at[worker], task.nbytes)
            self._clock.call_at(self._out_free_at[worker], partial(self._copied_out, worker, task))

    def _copied_out(self, worker: int, task: CommTask) -> None:
        made_at = task.ready_at
        self.inner.ready(worker, task)
        task.ready_at = made_at
        self._waiting[worker].sent(task)
        self._copy_out(worker)

    def done(self, worker: int, step: int, partition: int) -> None:
        """The average of a partition is in the host's memory."""
        self._back_free_at[worker] = self._copied_at(self._back_free_at[worker], self._nbytes[partition])
        self._clock.call_at(self._back_free_at[worker], partial(self._on_done, worker, step, partition))

    def _copied_at(self, free_at: float, nbytes: int) -> float:
        return max(free_at, self._clock.now) + nbytes * self._seconds_per_byte
