"""Sessions of ranks that are threads of one process: for tests, and for a rank that is alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .control.local import LocalControlWorld
from .core.config import SchedulerConfig
from .core.ports import Transport
from .core.world import World
from .session import Session
from .transports.local import LocalWorld


def local_sessions(
    world_size: int,
    config: SchedulerConfig | None = None,
    *,
    open_transport: Callable[[int, Session], Transport] | None = None,
    wrap_transport: Callable[[Transport], Transport] | None = None,
    order: str = "agreed",
) -> list[Session]:
    """One session per rank, all in this process: each is to be used, and closed, by a thread of its own.

    ``open_transport(rank, session)``, in a thread per rank, gives another transport than the local one; ``wrap_transport`` one
    around it.
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
        )

    with ThreadPoolExecutor(world_size) as pool:  # opening is collective
        return list(pool.map(open_rank, range(world_size)))
