"""The interface of a module in ``backends``: its ``BACKEND`` says how the transport of that name opens and what it uses, and
the context holds the arguments that it opens with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..core.interfaces import OnFailure, Transport
from ..core.world import World
from ..settings import Settings


@dataclass(frozen=True, slots=True)
class Backend:
    """A transport that a user can choose by the name of its module.

    Attributes:
        open: opens the transport of this rank. Collective: every rank of ``context.world`` calls it.
        settings: the names of the settings for some transports only (see ``Settings``) that have an effect with this one. A job
            that sets another one of them is refused. ``wire`` and ``hierarchy`` need nothing but partitions in the host's
            memory.
        prepare: called on every rank of the job before ``open``, also if only the leaders of hosts open the transport.
            Collective.
        listens_at_host: whether the other ranks connect to ``context.host``. They check first that they can.
        library: the Python module that it needs, and the extra of commsched that installs it; None if it needs none.
    """

    open: Callable[[TransportContext], Transport]
    settings: frozenset[str] = frozenset()
    prepare: Callable[[TransportContext], object] = lambda context: None
    listens_at_host: bool = False
    library: tuple[str, str] | None = None


#: Registers a callback for the failure of the job.
WhenFailed = Callable[[OnFailure], None]


@dataclass(frozen=True, slots=True)
class Contributors:
    """The ranks of a transport, each of which contributes to every average.

    They need not be the ranks of the job. With a hierarchy they are hosts, each of which stands for the ranks on it.
    ``members[r]`` is the job's rank that is rank ``r`` of the transport: messages name the job's rank, and MPI selects it from
    all ranks of the job. A sum is divided by ``divisor``, the number of ranks of the job, to become an average.
    """

    members: tuple[int, ...]
    divisor: int

    @classmethod
    def all_ranks(cls, world_size: int) -> Contributors:
        """The ranks of a job of that size, without a hierarchy."""
        return cls(tuple(range(world_size)), world_size)

    @property
    def world_size(self) -> int:
        return len(self.members)


@dataclass(frozen=True, slots=True)
class TransportContext:
    """The arguments of ``Backend.open``.

    ``gather(value)`` returns the JSON values of all ranks, in rank order. ``host`` is the address, without port, at which the
    other ranks reach this rank. ``control_address`` is the address of rank 0's control channel. ``job`` is the job's name.
    ``device`` is the one that holds the gradients, as far as is known: "cpu", or a device as PyTorch names it.
    ``when_failed(callback)`` registers a callback for the failure of the job. A transport that waits for other ranks while it
    opens needs it. ``could_not_start(error)`` reports to the job why this rank cannot open the transport, and returns when the
    job knows. It is for a transport whose own connections would give the other ranks a poorer reason when they end.

    ``world``, ``gather`` and ``Transport.leave`` count the ranks of ``contributors``, which are hosts with a hierarchy.
    """

    world: World
    settings: Settings
    host: str
    token: str = field(repr=False)
    control_address: str
    gather: Callable[[Any], list[Any]]
    on_failure: OnFailure
    when_failed: WhenFailed
    contributors: Contributors = Contributors((), 0)  # nobody means the ranks of ``world``
    job: str = ""
    device: str = "cpu"
    could_not_start: Callable[[BaseException], object] = lambda error: None

    def __post_init__(self) -> None:
        if not self.contributors.members:
            object.__setattr__(self, "contributors", Contributors.all_ranks(self.world.world_size))

    @property
    def job_rank(self) -> int:
        """This rank's number in the job, which names it in messages."""
        return self.contributors.members[self.world.rank]
