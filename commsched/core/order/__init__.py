"""The order in which ready tasks start.

Where messages carry their identity (a parameter server), each rank orders for itself, with a ``Scheduler``. Collectives carry
none: every rank must launch the same ones in the same order, which the ranks agree on with an :class:`~.agreed.AgreedOrder`.
"""

from __future__ import annotations

from typing import Protocol

from ..scheduler import Policy
from ..task import CommTask


class Order(Protocol):
    """What Core asks for the next task; called with its lock held. Pure: no thread, lock, clock or I/O.

    ``AgreedOrder`` raises CommschedError from its methods where the ranks cannot go on; ``Scheduler`` raises nothing.
    """

    def add(self, task: CommTask) -> int:
        """``task`` became ready; its policy's key."""
        ...

    def next(self) -> CommTask | None:
        """The task to start now, if there is one."""
        ...

    def sent(self, task: CommTask) -> None:
        """The bytes of a started task have left: its credit comes back."""
        ...

    def reconfigure(self, policy: Policy, credit_bytes: int) -> None:
        """Continue with another policy and credit."""
        ...
