"""What averages gradients in virtual time, as a worker class sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..core.task import CommTask

#: Told that the average of a partition is in place at a worker class: its index, the step, the partition's index.
OnDone = Callable[[int, int, int], None]


class ExchangeModel(Protocol):
    def ready(self, worker: int, task: CommTask) -> None:
        """The gradients of ``task`` exist on the worker class of that index."""
        ...
