"""A system under test: its description, the context from which a rank makes it, and the carriers of its gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from commsched import Session
from commsched.core.world import detect_world
from commsched.settings import Settings
from commsched.transports import without_effect

from .averaging import ConfigBarrier
from .measure import cpu_seconds

if TYPE_CHECKING:
    import torch

    from ..workloads import Workload
    from .loop import Loop
    from .simulated import Simulation
    from .timeline import Recorder

_T = TypeVar("_T")


@dataclass(frozen=True)
class Carrier:
    """A carrier of gradients, named as in ``Settings``. A session has exactly one carrier."""

    transport: str
    order: str = "auto"
    collective: str = "all_reduce"


@dataclass(frozen=True)
class Context:
    """The context of a system. There is one context for each carrier, which has a session of its own. The context is the same
    on every rank, except for ``session`` and ``host``.

    ``host`` is the address at which other ranks reach this one. ``bytes_scale`` is the factor by which an EMULATED model's
    gradients were multiplied; sizes that are meant for the real model must be multiplied by it too. ``partition_bytes``,
    ``credit_bytes`` and ``order`` are commsched's. ``message_seconds`` is the overhead of a partition with ``carrier``.
    ``clip`` and ``max_norm`` are as in ``loop.Loop``.
    """

    session: Session
    barrier: ConfigBarrier
    workload: Workload
    host: str
    carrier: Carrier
    bytes_scale: float
    partition_bytes: int
    credit_bytes: int
    message_seconds: float
    _shared: dict[Any, Any]
    order: str = "agreed"
    clip: str | None = None
    max_norm: float = 0.0

    def make_loop(self) -> Loop:
        """A training loop, as every system runs one."""
        from .loop import Loop

        return Loop(self.clip, self.max_norm, self.workload.device)

    def shared(self, make: Callable[[Context], _T]) -> _T:
        """The object that ``make(self)`` returned on the first call. Systems of one session share it."""
        if make not in self._shared:
            self._shared[make] = make(self)
        made: _T = self._shared[make]
        return made


@dataclass(frozen=True)
class Setup:
    """The setup of a system. ``transport`` is the transport of its gradients. ``words`` describes the rest for readers.
    ``message_seconds`` is the overhead of one message, besides its bytes. The sizes are None for a system without
    partitions."""

    transport: str
    words: str
    message_seconds: float | None
    partition_bytes: int | None = None
    credit_bytes: int | None = None
    fusion_bytes: int | None = None


class System(Protocol):
    """One way to train. A turn is ``begin``, then several times ``forward`` and ``update``, then ``end``. All are collective.

    ``initial`` holds the weights from which every turn starts.
    """

    setup: Setup
    model: torch.nn.Module
    initial: list[torch.Tensor]

    def begin(self) -> None:
        """Restore the initial weights, and switch to this system's configuration, which is in use two steps later at the
        latest."""
        ...

    def require_ready(self) -> None:
        """Raise CommschedError unless the system runs with its configuration. Called when steps begin to count."""
        ...

    def forward(self, step: int) -> torch.Tensor:
        """The loss of this rank's batch."""
        ...

    def update(self, loss: torch.Tensor) -> None:
        """Backward, averaging and the optimizer's step. Work that a later step can do may stay outstanding."""
        ...

    def end(self) -> None:
        """Return when every update is complete."""
        ...

    def observe(self, recorder: Recorder) -> None:
        """Report all further messages to ``recorder``. Called once, after the last turn."""
        ...


@dataclass(frozen=True)
class SystemInfo:
    """All that the bench knows of a system. Each file of ``bench/systems`` has one as ``SYSTEM``.

    Args:
        order: the place among the systems in plots and tables; the least comes first.
        colour, marker: those of the system in plots. No other system has the same.
        simulated: the system as rules of the simulator. Every system has them.
        make_system: makes the system on a rank. Collective. The system may train for a while to find its best settings. None if
            the system is only simulated. It imports engines and optional packages when it is called, because reports and
            predictions need neither, and raises UnsupportedError if they are missing.
        clips: whether its loop can clip: there is a moment between averaging and the update.
    """

    order: int
    colour: str
    marker: str
    simulated: Simulation
    make_system: Callable[[Context], System] | None = None
    clips: bool = True

    @property
    def is_on_commsched(self) -> bool:
        """Whether gradients travel by a transport of commsched, which can then be chosen for each system."""
        return self.simulated.is_on_commsched


@dataclass(frozen=True)
class OpenCarrier:
    """An open session of a carrier. ``shared`` holds the objects that systems of this session share; see ``Context``."""

    session: Session
    barrier: ConfigBarrier
    shared: dict[Any, Any] = field(default_factory=dict)


def open_carriers(session: Session, own: Carrier, wanted: Iterable[Carrier], stack: ExitStack) -> dict[Carrier, OpenCarrier]:
    """Open a session for each wanted carrier except ``own``, the carrier of ``session``. ``stack`` closes the opened sessions.
    Collective.

    Raises:
        CommschedError: a session could not be opened; see ``commsched.init``.
    """
    carriers = {own: OpenCarrier(session, ConfigBarrier(session))}
    for carrier in wanted:
        if carrier not in carriers:
            opened = stack.enter_context(_open(carrier, len(carriers)))
            carriers[carrier] = OpenCarrier(opened, ConfigBarrier(opened))
    return carriers


def _open(carrier: Carrier, number: int) -> Session:
    """Open the ``number``-th session beside the job's own. It meets at the port ``number`` higher, or at a file beside the
    job's."""
    from commsched.session.opening import open_session

    job = Settings.load({}, os.environ)
    place: dict[str, object] = {}
    if job.control is not None:
        host, port = job.control.rsplit(":", 1)
        place["control"] = f"{host}:{int(port) + number}"
    if job.rendezvous is not None:
        place["rendezvous"] = f"{job.rendezvous}.{number}"
    for name in without_effect(job, carrier.transport):  # they are for the job's own carrier
        if name != "security":
            place[name] = job.hosts[0] if name == "host" else getattr(Settings(), name)
    environ = {name: value for name, value in os.environ.items() if name.removeprefix("COMMSCHED_").lower() not in place}
    return open_session(detect_world(os.environ), Settings.load({**asdict(carrier), **place}, environ))


def timed_turn(
    system: System, barrier: ConfigBarrier, settle: int, steps: int, server_pids: Sequence[int] = (), device: str = "cpu"
) -> tuple[list[float], float]:
    """Run a turn of ``system``: ``settle`` steps, then ``steps`` steps that count. Collective.

    Returns the seconds of each counted step, and the CPU seconds of this process and the processes ``server_pids`` meanwhile.

    A step lasts from the beginning of one forward to the beginning of the next, as ``device`` reaches them. Outstanding work
    therefore counts in a later step.
    """
    from .layer_times import clock_of

    clock = clock_of(device)
    system.begin()
    barrier.wait()
    for step in range(settle):
        system.update(system.forward(step))
    system.require_ready()
    cpu_began, moments = cpu_seconds(server_pids), [clock.now()]
    for step in range(settle, settle + steps):
        system.update(system.forward(step))
        moments.append(clock.now())
    cpu = cpu_seconds(server_pids) - cpu_began
    system.end()
    return [after - before for before, after in pairwise(clock.seconds(moments))], cpu
