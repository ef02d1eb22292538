"""A parameter server: a shard that listens in a rank's process, or in a process of its own, which serves one job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol

from ....core.errors import CommschedError
from ....core.interfaces import OnFailure
from .frame import WorkerHello
from .service import Service, ServiceContext
from .stream import StreamOptions, open_port


class Shard:
    """A port around a :class:`Service`. It listens from construction on, and raises as :func:`open_port` does.

    Args:
        address: ``host:port`` to listen at; port 0 means any free port.
        options: the options of its streams; the lane is the same as the workers'.
        context: the arguments of the service. The address is added to the name.
    """

    def __init__(self, address: str, options: StreamOptions, context: ServiceContext) -> None:
        self._port = open_port(address, options)
        #: ``host:port`` as bound.
        self.address = self._port.address
        #: Handles the messages of this server. A rank in the same process calls it directly.
        self.service = Service(replace(context, name=f"{context.name} at {self.address}"))
        self._port.serve(self.service.serve)

    def close(self, graceful: bool = True) -> None:
        """Say goodbye to the workers that are still connected, and release the port and all threads. Idempotent."""
        self.service.close()
        self._port.close(graceful)


class Membership(Protocol):
    """A server's membership in the job's control channel, which watches the server and notifies it of failures elsewhere."""

    def report(self, error: CommschedError) -> None: ...

    def close(self) -> None: ...


#: Joins the control channel named in the first worker's hello. The string is the name of that worker's job. ``OnFailure`` is
#: called with failures anywhere in the job.
JoinJob = Callable[[WorkerHello, str, OnFailure], Membership]


def serve_shard(address: str, options: StreamOptions, *, join: JoinJob, announce: Callable[[str], None]) -> int:
    """Serve one job at ``address`` and return 0 when every worker has said goodbye.

    ``announce`` is called with the bound address, before any worker has connected. The server waits for the first worker
    without limit, and takes the world size from that worker's hello. Workers are welcomed once the server is in the control
    channel, which then watches the server. ``options`` are closed at the end.

    Raises:
        ConfigError: the server cannot listen at the address, or the token is empty.
        CommschedError: the job failed; every worker that is still connected gets the same error.
    """
    events: SimpleQueue[WorkerHello | CommschedError | None] = SimpleQueue()  # None means that every worker has said goodbye
    joined = threading.Event()  # or the job has failed
    shard = None
    membership: Membership | None = None

    def greet(hello: WorkerHello) -> None:
        events.put(hello)
        joined.wait()

    def fail(error: CommschedError) -> None:
        events.put(error)
        joined.set()

    def next_event() -> WorkerHello | None:
        event = events.get()
        if isinstance(event, CommschedError):
            raise event
        return event

    def on_failure(error: CommschedError) -> None:
        # A lane often breaks because of a failure elsewhere. The control channel knows which failure was first, and reports it
        # to all processes, this server included.
        if membership is not None:
            membership.report(error)
        else:
            fail(error)

    try:
        context = ServiceContext("the server", on_failure, on_first_hello=greet, on_all_left=lambda: events.put(None))
        shard = Shard(address, options, context)
        announce(shard.address)
        hello = next_event()
        assert hello is not None  # nobody says goodbye before
        membership = join(hello, shard.service.job, fail)
        joined.set()
        next_event()
        return 0
    except CommschedError as error:
        if shard is not None:
            shard.service.fail(error)
        raise
    finally:
        joined.set()  # ``greet`` must not wait any more, whatever happened
        for part in (shard, options, membership):
            if part is not None:
                part.close()
