"""Scheduler: which ready task starts next. Pure: no thread, lock, clock or I/O.

The same class runs in Core, in the parameter server's replies and in virtual time in the simulator.
"""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

from .credit import CreditWindow


class Schedulable(Protocol):
    """What the scheduler needs to know of a task."""

    @property
    def nbytes(self) -> int: ...

    @property
    def priority(self) -> int: ...


T = TypeVar("T", bound=Schedulable)


class Policy(Protocol):
    """The order in which ready tasks start. One file in ``core/policies`` each.

    ``splits``: an average is made by a reduce-scatter and an all-gather, each a task of its own, and not by an all-reduce.
    """

    splits: bool

    def key(self, task: Schedulable) -> int:
        """Smaller starts earlier; equal keys start in order of arrival. Must not change while a task waits.

        0 to 2^32 - 1: it travels with the task, so that queues behind this rank's scheduler keep the same order.
        """
        ...


class Scheduler(Generic[T]):
    """A heap of ready tasks behind a :class:`CreditWindow` (ByteScheduler, SOSP'19, algorithm 1, in bytes).

    Only the best ready task may start. When it does not fit the credit, nothing starts: a smaller task that overtook it
    would be a priority inversion.
    """

    def __init__(self, policy: Policy, credit_bytes: int) -> None:
        self.credit = CreditWindow(credit_bytes)
        self._policy = policy
        self._heap: list[tuple[int, int, T]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, task: T) -> int:
        """``task`` became ready; its key."""
        self._arrivals += 1
        key = self._policy.key(task)
        heapq.heappush(self._heap, (key, self._arrivals, task))
        return key

    def next(self) -> T | None:
        """The task to start now, with its bytes taken from the credit; None if none is ready or the best does not fit."""
        if not self._heap or not self.credit.admits(self._heap[0][2].nbytes):
            return None
        task = heapq.heappop(self._heap)[2]
        self.credit.take(task.nbytes)
        return task

    def sent(self, task: T) -> None:
        """The bytes of a started task have left: its credit comes back."""
        self.credit.give_back(task.nbytes)

    def reconfigure(self, policy: Policy, credit_bytes: int) -> None:
        """Continue with another policy and credit; waiting tasks keep their order of arrival."""
        self.credit.limit = credit_bytes
        self._policy = policy
        self._heap = [(policy.key(task), arrival, task) for _, arrival, task in self._heap]
        heapq.heapify(self._heap)

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._heap)} ready, {self.credit!r}>"
