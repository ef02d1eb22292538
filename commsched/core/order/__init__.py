"""The order in which ready tasks start.

If messages carry their identity (a parameter server), each rank orders its own tasks with a ``Scheduler``. Collectives carry no
identity: every rank must launch the same collectives in the same order. The ranks agree on that order with an
:class:`~.agreed.AgreedOrder`.
"""

from __future__ import annotations

from typing import Protocol

from ..scheduler import Policy
from ..task import CommTask


class Order(Protocol):
    """The source of Core's next task. Core calls it with its lock held. Pure: no thread, lock, clock or I/O.

    The methods of ``AgreedOrder`` raise CommschedError if the ranks cannot continue. ``Scheduler`` raises nothing.
    """

    def add(self, task: CommTask) -> int:
        """Add ``task``, which became ready. Returns its key by the policy."""

    def next(self) -> CommTask | None:
        """Return the task to start now, if there is one."""

    def has_work(self) -> bool:
        """Whether a call of ``next`` may return a task, or there is a message to send. False spares a wake-up."""
        ...

    def sent(self, task: CommTask) -> None:
        """Return the credit of a started task, whose bytes have left this rank."""

    def reconfigure(self, policy: Policy, credit_bytes: int) -> None:
        """Continue with another policy and credit."""
