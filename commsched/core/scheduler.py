"""Scheduler: chooses the next task to send, by the configuration. Pure: no thread, clock or I/O."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

#: The values of ``SchedulerConfig.collective`` and ``SchedulerConfig.order``.
COLLECTIVES = ("all_reduce", "rsag")
LAUNCH_ORDERS = ("agreed", "static")

#: The largest partition. It bounds the size of one message from any peer before a manifest is known.
MAX_PARTITION_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The settings that may change while training runs. Ranks replace them as a whole, at a step number that all agreed on.

    ``collective`` says of which tasks an average is made: one all-reduce, or a reduce-scatter and then an all-gather
    (``rsag``). A more urgent task may go between the two, and neither waits for the end of the other. DeAR (ICDCS'23) sends all
    reduce-scatters in backward and all all-gathers in the next forward. Here both are in one queue, in the policy's order.

    ``order`` says how ranks agree on the order of collectives: anew for every launch (``agreed``), or once, as soon as it
    repeats itself (``static``).
    """

    partition_bytes: int = 4_000_000
    credit_bytes: int = 16_000_000
    policy: str = "priority"
    fusion_bytes: int | None = None  # small neighbours are merged up to this size; None: see cut
    collective: str = "all_reduce"
    order: str = "agreed"

    def to_record(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


class CreditWindow:
    """The credit: admits at most ``limit`` bytes ``in_flight``. Pure, not thread-safe.

    One task is always admitted when nothing is in flight, so a partition larger than the window cannot block for ever.
    A smaller limit never revokes credit of tasks in flight; it only delays further tasks.
    """

    __slots__ = ("in_flight", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0

    def admits(self, nbytes: int) -> bool:
        return self.in_flight == 0 or self.in_flight + nbytes <= self.limit

    def take(self, nbytes: int) -> None:
        self.in_flight += nbytes

    def give_back(self, nbytes: int) -> None:
        if nbytes > self.in_flight:
            raise AssertionError(f"{nbytes} bytes of credit came back, but only {self.in_flight} are in flight")
        self.in_flight -= nbytes

    def __repr__(self) -> str:
        return f"<CreditWindow {self.in_flight}/{self.limit} B>"


class Schedulable(Protocol):
    """The properties of a task that the scheduler uses."""

    @property
    def nbytes(self) -> int: ...

    @property
    def priority(self) -> int: ...


T = TypeVar("T", bound=Schedulable)


#: The largest key. Every queue sends a message with it behind all others that are there.
LAST_KEY = (1 << 32) - 1


def is_key(key: object) -> bool:
    """Whether ``key`` is what :meth:`Policy.key` may return, which is what the wire carries."""
    return type(key) is int and 0 <= key <= LAST_KEY


class Policy(Protocol):
    """The order in which ready tasks start. Each policy is one file in ``core/policies``. It knows the size and the priority of
    one task at a time, and not how many there are.
    """

    def key(self, task: Schedulable) -> int:
        """The sort key of ``task``, 0 to 2^32 - 1. Smaller keys start earlier; equal keys start in order of arrival.

        The key must not change while a task waits. It travels with the task, so that queues behind this rank's scheduler keep
        the same order.
        """


class ReadyTasks(Generic[T]):
    """The ready tasks, best first by ``policy``. Pure, not thread-safe."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[int, int, T]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, task: T) -> int:
        """Add ``task``, which became ready. Returns its key."""
        self._arrivals += 1
        key = self._policy.key(task)
        heapq.heappush(self._heap, (key, self._arrivals, task))
        return key

    @property
    def best(self) -> T | None:
        """The task that :meth:`pop` returns; None if there is none."""
        return self._heap[0][2] if self._heap else None

    def pop(self) -> T:
        """Remove and return the best task."""
        return heapq.heappop(self._heap)[2]

    def use(self, policy: Policy) -> None:
        """Continue with another policy; tasks keep their order of arrival."""
        self._policy = policy
        self._heap = [(policy.key(task), arrival, task) for _, arrival, task in self._heap]
        heapq.heapify(self._heap)


class Scheduler(ReadyTasks[T]):
    """A heap of ready tasks behind a :class:`CreditWindow` (ByteScheduler, SOSP'19, algorithm 1, in bytes).

    Only the best ready task may start. If it does not fit the credit, nothing starts, because a smaller task that overtook it
    would be a priority inversion.
    """

    def __init__(self, policy: Policy, credit_bytes: int) -> None:
        super().__init__(policy)
        self.credit = CreditWindow(credit_bytes)

    def next(self) -> T | None:
        """Return the task to start now and take its bytes from the credit; None if none is ready or the best does not fit."""
        task = self.best
        if task is None or not self.credit.admits(task.nbytes):
            return None
        self.credit.take(task.nbytes)
        return self.pop()

    def has_work(self) -> bool:
        """Whether :meth:`next` returns a task."""
        return bool(self._heap) and self.credit.admits(self._heap[0][2].nbytes)

    def sent(self, task: T) -> None:
        """Return the credit of a started task, whose bytes have left this rank."""
        self.credit.give_back(task.nbytes)

    def reconfigure(self, policy: Policy, credit_bytes: int) -> None:
        """Continue with another policy and credit; waiting tasks keep their order of arrival."""
        self.credit.limit = credit_bytes
        self.use(policy)

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._heap)} ready, {self.credit!r}>"
