"""What a system is given to make itself of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..train.start_line import StartLine
from ..workloads.workload import Workload
from .spec import Way

if TYPE_CHECKING:
    from commsched.session import Session

_T = TypeVar("_T")


@dataclass(frozen=True)
class Context:
    """The same on every rank, but for ``session``. There is one for each way of gradients to travel, which has a session of its
    own, and policy.

    ``host`` is the address at which other ranks reach this one; ``bytes_scale`` is what an EMULATED model's gradients were
    multiplied by, as sizes that are meant for the real one are to be; ``partition_bytes`` and ``credit_bytes`` are commsched's;
    ``message_seconds`` is what a partition costs with ``way`` and ``policy``, which is that of systems that put front layers
    first.
    """

    session: Session
    line: StartLine
    workload: Workload
    host: str
    way: Way
    policy: str
    bytes_scale: float
    partition_bytes: int
    credit_bytes: int
    message_seconds: float
    _shared: dict[Any, Any]

    def shared(self, make: Callable[[Context], _T]) -> _T:
        """What ``make(self)`` gave the first time: what several systems of one session have in common."""
        if make not in self._shared:
            self._shared[make] = make(self)
        made: _T = self._shared[make]
        return made
