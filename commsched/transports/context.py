"""What a transport is given when it opens. Each transport module defines ``open_transport(context) -> Transport``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.config import Settings
from ..core.errors import CommschedError
from ..core.ports import OnFailure
from ..core.world import World


@dataclass(frozen=True, slots=True)
class TransportContext:
    """``gather(value)`` returns the JSON value of every rank in rank order. ``host`` is the address, without port, that
    the other ranks reach this one at; ``control_address`` is where rank 0's control channel listens. ``when_failed(callback)``
    lets a transport that waits for others while it opens hear that the job has failed.

    The ranks of a transport need not be those of the job: with a hierarchy they are hosts, each of which stands for its ranks,
    and ``world``, ``gather`` and ``leave`` count hosts. ``members[r]`` is the rank of the job that is rank ``r`` of ``world``:
    messages name that one, and MPI takes it from all of the job's. A sum over ``world`` is divided by ``divisor``, the
    number of ranks of the job, to become an average.
    """

    world: World
    settings: Settings
    host: str
    token: str
    control_address: str
    gather: Callable[[Any], list[Any]]
    on_failure: OnFailure
    when_failed: Callable[[Callable[[CommschedError], None]], None]
    members: tuple[int, ...] = ()  # not given: all ranks of the job
    divisor: int = 0  # not given: the number of ranks

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", self.members or tuple(range(self.world.world_size)))
        object.__setattr__(self, "divisor", self.divisor or self.world.world_size)
