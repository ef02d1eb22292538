"""Sessions whose ranks are threads of one process: for tests, and for a rank that is alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..control.local import LocalControlWorld
from ..core.config import SchedulerConfig
from ..core.interfaces import Transport
from ..core.world import World
from ..transports.backends.local import LocalWorld
from .session import Session


def local_sessions(
    world_size: int,
    config: SchedulerConfig | None = None,
    *,
    open_transport: Callable[[int, Session], Transport] | None = None,
    wrap_transport: Callable[[Transport], Transport] | None = None,
    order: str = "agreed",
    warn_after_seconds: float = 10.0,
    stall_after_seconds: float | None = None,
    check_weights: int = 0,
) -> list[Session]:
    """Open one session per rank, all in this process. Each must be used, and closed, by a thread of its own.

    ``open_transport(rank, session)`` returns a transport to use instead of the local one; it is called in one thread per rank.
    ``wrap_transport`` returns a transport that wraps the given one.
    """
    controls, transports = LocalControlWorld(world_size), LocalWorld(world_size)

    def open_local(rank: int, session: Session) -> Transport:
        return transports.transport(rank, session.report)

    def open_rank(rank: int) -> Session:
        def open_and_wrap(session: Session) -> Transport:
            transport = (open_transport or open_local)(rank, session)
            return wrap_transport(transport) if wrap_transport is not None else transport

        return Session(
            World(rank, world_size, rank, world_size, "threads"),
            config or SchedulerConfig(),
            open_control=lambda listener: controls.join(rank, listener),
            open_transport=open_and_wrap,
            order=order,
            check_weights=check_weights,
            warn_after_seconds=warn_after_seconds,
            stall_after_seconds=stall_after_seconds,
        )

    with ThreadPoolExecutor(world_size) as pool:  # opening is collective
        return list(pool.map(open_rank, range(world_size)))
