"""A parameter server: a shard that listens in a rank's process, or in a process of its own, which serves one job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ....core.errors import CommschedError
from ....core.interfaces import OnFailure
from .frame import WorkerHello
from .service import Service, ServiceContext
from .stream import StreamOptions, open_port


class Shard:
    """A port around a :class:`Service`. It listens from construction on.

    Args:
        address: ``host:port`` to listen at; port 0 means any free port.
        options: the options of its streams; the lane is the same as the workers'.
        context: the arguments of the service. The address is added to the name.

    Raises:
        ConfigError: the shard cannot listen at the address, or the token is empty.
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
Join = Callable[[WorkerHello, str, OnFailure], Membership]


def serve_shard(address: str, options: StreamOptions, *, join: Join, announce: Callable[[str], None]) -> int:
    """Serve one job at ``address`` and return 0 when every worker has said goodbye.

    ``announce`` is called with the bound address, before any worker has connected. The server waits for the first worker
    without limit, and takes the world size from that worker's hello. Workers are welcomed once the server is in the control
    channel, which then watches the server. ``options`` are closed at the end.

    Raises:
        ConfigError: the server cannot listen at the address, or the token is empty.
        CommschedError: the job failed; every worker that is still connected gets the same error.
    """
    job = _Job()
    shard = None
    membership: Membership | None = None

    def on_failure(error: CommschedError) -> None:
        # A lane often breaks because of a failure elsewhere. The control channel knows which failure was first, and reports it
        # to all processes, this server included.
        if membership is not None:
            membership.report(error)
        else:
            job.fail(error)

    try:
        context = ServiceContext("the server", on_failure, on_first_hello=job.join, on_all_left=job.end)
        shard = Shard(address, options, context)
        announce(shard.address)
        hello = job.wait_for_hello()
        membership = join(hello, shard.service.job, job.fail)
        job.joined()
        job.wait_for_end()
        return 0
    except CommschedError as error:
        if shard is not None:
            shard.service.fail(error)
        raise
    finally:
        job.joined()  # ``_Job.join`` must not wait any more, whatever happened
        for part in (shard, options, membership):
            if part is not None:
                part.close()


class _Job:
    """The state that the main thread waits for: the first hello, then the end or a failure."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._hello: WorkerHello | None = None
        self._joined = False
        self._ended = False
        self._failure: CommschedError | None = None

    def join(self, hello: WorkerHello) -> None:
        """The first worker has come: let the main thread join, and return when it has joined or the job has failed."""
        with self._changed:
            self._hello = hello
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._joined or self._failure is not None)

    def joined(self) -> None:
        with self._changed:
            self._joined = True
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def fail(self, error: CommschedError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def wait_for_hello(self) -> WorkerHello:
        with self._changed:
            while self._hello is None:
                self._require_no_failure()
                self._changed.wait()
            return self._hello

    def wait_for_end(self) -> None:
        with self._changed:
            while not self._ended:
                self._require_no_failure()
                self._changed.wait()

    def _require_no_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
