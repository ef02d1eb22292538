"""The context from which a system is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..harness.config_barrier import ConfigBarrier
from ..workloads.workload import Workload
from .spec import Way

if TYPE_CHECKING:
    from commsched.session.session import Session

_T = TypeVar("_T")


@dataclass(frozen=True)
class Context:
    """The context of a system. There is one context for each pair of a way and a collective; each way has a session of its own.
    The context is the same on every rank, except for ``session`` and ``host``.

    ``host`` is the address at which other ranks reach this one. ``bytes_scale`` is the factor by which an EMULATED model's
    gradients were multiplied; sizes that are meant for the real model must be multiplied by it too. ``partition_bytes`` and
    ``credit_bytes`` are commsched's. ``message_seconds`` is the overhead of a partition with ``way`` and ``collective``.
    """

    session: Session
    line: ConfigBarrier
    workload: Workload
    host: str
    way: Way
    collective: str
    bytes_scale: float
    partition_bytes: int
    credit_bytes: int
    message_seconds: float
    _shared: dict[Any, Any]

    def shared(self, make: Callable[[Context], _T]) -> _T:
        """The object that ``make(self)`` returned on the first call. Systems of one session share it."""
        if make not in self._shared:
            self._shared[make] = make(self)
        made: _T = self._shared[make]
        return made
