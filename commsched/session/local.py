"""Sessions whose ranks are threads of one process: for tests, and for a rank that is alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..control.end import ControlEnd
from ..control.local import LocalControlWorld
from ..core.core import Core
from ..core.interfaces import Transport
from ..core.scheduler import SchedulerConfig
from ..transports.backends.local import LocalWorld
from .session import Session, starting


def local_sessions(
    world_size: int,
    config: SchedulerConfig | None = None,
    *,
    open_transport: Callable[[int, ControlEnd], Transport] | None = None,
    wrap_transport: Callable[[Transport], Transport] | None = None,
    order: str = "agreed",
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
                order=order,
            )
            undo.callback(core.close)
            return Session(control, transport, core, check_weights=check_weights)

    with ThreadPoolExecutor(world_size) as pool:  # opening is collective
        return list(pool.map(open_rank, range(world_size)))
