"""The arguments that a transport opens with. Each transport module defines ``open_transport(context) -> Transport``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.errors import CommschedError
from ..core.interfaces import OnFailure
from ..core.world import World
from ..settings import Settings


@dataclass(frozen=True, slots=True)
class TransportContext:
    """The arguments of ``open_transport``.

    ``gather(value)`` returns the JSON values of all ranks, in rank order. ``host`` is the address, without port, at which the
    other ranks reach this rank. ``control_address`` is the address of rank 0's control channel. ``job`` is the job's name.
    ``when_failed(callback)`` registers a callback for the failure of the job. A transport that waits for other ranks while it
    opens needs it. ``could_not_start(error)`` reports to the job why this rank cannot open the transport, and returns when the
    job knows. It is for a transport whose own connections would give the other ranks a poorer reason when they end.

    The ranks of a transport need not be the ranks of the job. With a hierarchy the transport's ranks are hosts, each of which
    stands for the ranks on it, and ``world``, ``gather`` and ``Transport.leave`` count hosts. ``members[r]`` is the job's rank
    that is rank ``r`` of ``world``: messages name the job's rank, and MPI selects it from all ranks of the job. A sum over
    ``world`` is divided by ``divisor``, the number of ranks of the job, to become an average.
    """

    world: World
    settings: Settings
    host: str
    token: str
    control_address: str
    gather: Callable[[Any], list[Any]]
    on_failure: OnFailure
    when_failed: Callable[[Callable[[CommschedError], None]], None]
    members: tuple[int, ...] = ()  # empty means all ranks of the job
    divisor: int = 0  # 0 means the number of ranks
    job: str = ""
    could_not_start: Callable[[BaseException], object] = lambda error: None

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", self.members or tuple(range(self.world.world_size)))
        object.__setattr__(self, "divisor", self.divisor or self.world.world_size)
