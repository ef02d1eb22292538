"""Sessions whose ranks are threads of one process, and their control channel: for tests, and for a rank that is alone."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..control.end import ControlEnd
from ..control.messages import PROTOCOL, Hello, Member, Message, decode, encode
from ..control.roster import Roster
from ..core.core import Core
from ..core.interfaces import Transport
from ..core.scheduler import SchedulerConfig
from ..transports.backends.local import LocalWorld
from ..version import __version__
from .session import Session, starting


class LocalControlWorld:
    """The roster of the ranks of one process. All of them have joined, but none is watched: their process lives as long as this
    object."""

    def __init__(self, world_size: int) -> None:
        self.changed = threading.Condition()  # guards the roster and every rank's end
        self._roster = Roster(world_size, "", 0, fail_after_seconds=math.inf, join_within_seconds=math.inf, now=0.0)
        self.ends = [LocalControl(self, Member.thread(rank, world_size)) for rank in range(world_size)]
        for rank in range(world_size):
            self._roster.received(rank, Hello(__version__, PROTOCOL, Member.thread(rank, world_size), math.inf), 0.0)

    def received(self, rank: int, data: bytes) -> None:
        """``rank`` sent ``data``. Called with ``changed`` held: all ranks receive messages in the order of the decisions."""
        for send in [*self._roster.received(rank, decode(data), 0.0), *self._roster.tell_left()]:
            reply = encode(send.message)
            for connection in send.connections:
                self.ends[connection]._received(decode(reply))  # each rank gets values of its own


class LocalControl(ControlEnd):
    """One rank's end; over a network it is a ``ControlClient``. Its listener is called in a thread of its own, which the only
    rank of a world does not need."""

    def __init__(self, world: LocalControlWorld, member: Member) -> None:
        super().__init__(member, world.changed, lazily=True)
        self._world = world
        self._callbacks.start()

    def _put(self, message: Message) -> None:
        with self._changed:
            self._world.received(self._member.index, encode(message))


def local_sessions(
    world_size: int,
    config: SchedulerConfig | None = None,
    *,
    open_transport: Callable[[int, ControlEnd], Transport] | None = None,
    wrap_transport: Callable[[Transport], Transport] | None = None,
    warn_after_seconds: float = 10.0,
    stall_after_seconds: float | None = None,
    check_weights: int = 0,
) -> list[Session]:
    """Open one session per rank, all in this process. Each must be used, and closed, by a thread of its own.

    ``open_transport(rank, control)`` returns a transport to use instead of the local one; it is called in one thread per rank.
    ``wrap_transport`` returns a transport that wraps the given one.
    """
    controls, transports = LocalControlWorld(world_size).ends, LocalWorld(world_size)

    def open_rank(rank: int) -> Session:
        control = controls[rank]
        with starting(control) as undo:
            if open_transport is not None:
                transport = open_transport(rank, control)
            else:
                transport = transports.transport(rank, control.report)
            if wrap_transport is not None:
                transport = wrap_transport(transport)
            undo.callback(transport.close, graceful=False)
            core = Core(
                transport,
                config or SchedulerConfig(),
                on_failure=control.report,
                warn_after_seconds=warn_after_seconds,
                stall_after_seconds=stall_after_seconds,
                messenger=control,
            )
            undo.callback(core.close)
            return Session(control, transport, core, check_weights=check_weights)

    with ThreadPoolExecutor(world_size) as pool:  # opening is collective
        return list(pool.map(open_rank, range(world_size)))
