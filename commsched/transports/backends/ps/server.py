"""Parameter servers: a shard that listens in a rank's process, and a server in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol

from ....core.errors import CommschedError
from ....core.interfaces import OnFailure
from ....net.rpc import most_strangers
from .frame import WorkerHello
from .service import OfNextJob, Service, ServiceContext
from .stream import ServedStream, StreamOptions, open_port


class Shard:
    """A port around a :class:`Service`. It listens from construction on, and raises as :func:`open_port` does.

    Args:
        address: ``host:port`` to listen at; port 0 means any free port.
        options: the options of its streams; the lane is the same as the workers'.
        context: the arguments of the service. The address is added to the name.
    """

    def __init__(self, address: str, options: StreamOptions, context: ServiceContext) -> None:
        workers = 0 if context.contributors is None else context.contributors.world_size
        # Over TLS a worker has a second connection for a moment, by which it looks at the certificate.
        self._port = open_port(address, options, 2 * workers)
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


class Server:
    """A parameter server in a process of its own, which serves one job after another.

    It listens from construction on until :meth:`close`, so that it refuses connections only if its process has ended. Between
    two jobs, workers wait for the next call of :meth:`serve_job`.

    Args:
        address: ``host:port`` to listen at; port 0 means any free port.
        options: the options of its streams; the lane is the same as the workers'. Closed with the server.

    Raises:
        ConfigError: the server cannot listen at the address, or the token is empty.
    """

    def __init__(self, address: str, options: StreamOptions) -> None:
        self._options = options
        self._changed = threading.Condition()  # guards the two below
        self._service: Service | None = None  # of the job in hand, or of the next one
        self._closed = False
        # The number of workers is not known yet. This process has hardly any other file, so workers may have half of its files.
        self._port = open_port(address, options, 2 * most_strangers())
        #: ``host:port`` as bound.
        self.address = self._port.address
        self._port.serve(self._serve)

    def serve_job(self, join: JoinJob) -> None:
        """Serve one job, and return when every worker has said goodbye.

        The server waits for the first worker without limit, and takes the world size from that worker's hello. Workers are
        welcomed once the server is in the control channel, which then watches the server.

        Raises:
            CommschedError: the job failed; every worker that is still connected gets the same error.
        """
        events: SimpleQueue[WorkerHello | CommschedError | None] = SimpleQueue()  # None: every worker has said goodbye
        joined = threading.Event()  # or the job has failed
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
            # A lane often breaks because of a failure elsewhere. The control channel knows which failure was first, and reports
            # it to all processes, this server included.
            if membership is not None:
                membership.report(error)
            else:
                fail(error)

        name = f"the server at {self.address}"
        service = Service(ServiceContext(name, on_failure, on_first_hello=greet, on_all_left=lambda: events.put(None)))
        try:
            self._change(service)
            hello = next_event()
            assert hello is not None  # nobody says goodbye before
            membership = join(hello, service.job, fail)
            joined.set()
            next_event()
        except CommschedError as error:
            service.fail(error)
            raise
        finally:
            joined.set()  # ``greet`` must not wait any more, whatever happened
            self._change(None)
            service.close()
            if membership is not None:
                membership.close()

    def close(self) -> None:
        """Release the port and all threads, once the streams have ended, or after a moment. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._port.close(graceful=True)
        self._options.close()

    def _change(self, service: Service | None) -> None:
        with self._changed:
            self._service = service
            self._changed.notify_all()

    def _serve(self, stream: ServedStream, job: str) -> None:
        """Let the service of the job in hand handle ``stream``, or that of the next one. Called in a thread of the stream's
        own."""
        service: Service | None = None
        hello: WorkerHello | None = None
        while (service := self._service_after(service)) is not None:
            if stream.has_ended:  # a worker of a job that is over; its hello should not begin that job again
                break
            try:
                return service.serve(stream, job, hello)
            except OfNextJob as waits:
                hello = waits.hello
        stream.outbox.abort()

    def _service_after(self, ended: Service | None) -> Service | None:
        """Wait for a service other than ``ended``, and return it; None if this server ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._service not in (None, ended))
            return None if self._service is ended else self._service
