"""``commsched server``: a parameter server, joined to the job's control channel, for one job or for one job after another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import NoReturn

from ..control.client import ControlClient
from ..control.events import Listener
from ..control.member import Member
from ..control.rendezvous import own_host
from ..control.witnessed import Witness
from ..core.errors import CommschedError, ProtocolError
from ..core.interfaces import OnFailure
from ..core.standard_streams import say_error, say_out
from ..settings import Settings
from ..transports.backends.ps import server
from ..transports.backends.ps.frame import WorkerHello
from ..transports.backends.ps.stream import StreamOptions


def serve_jobs(address: str, token: str, settings: Settings) -> NoReturn:
    """Serve one job after another at ``address``, however each job ends, and print its end on stderr.

    Raises:
        CommschedError: the server could not start.
    """
    while True:
        bound: list[str] = []
        try:
            serve(address, token, settings, bound.append)
            ended = "has ended"
        except CommschedError as error:
            if not bound:
                raise
            ended = f"has failed: {type(error).__name__}: {error}"
        address = bound[0]
        say_error(f"commsched server: the job {ended}; ready for the next")


def serve(address: str, token: str, settings: Settings, on_bound: Callable[[str], None] = lambda address: None) -> int:
    """Serve one job at ``address`` and return 0 when every worker has left in good order.

    Passes the bound address to ``on_bound``, and prints it on stdout, before any worker can connect.

    Raises:
        CommschedError: the job failed, or the server could not start.
    """

    def announce(bound: str) -> None:
        on_bound(bound)
        say_out(f"commsched server listening on {bound}")

    def join(hello: WorkerHello, job: str, on_failure: OnFailure) -> server.Membership:
        if hello.control_address is None:
            raise ProtocolError(f"rank {hello.rank} did not say where the control channel is")
        host = own_host(settings, hello.control_address)
        witness = stack.enter_context(closing(Witness(host)))
        return ControlClient(
            hello.control_address,
            token,
            Member.server(hello.server, host, witness.address),
            _Listener(on_failure),
            fail_after_seconds=settings.fail_after,
            join_within_seconds=settings.join_within,
            job=job,
        )

    with ExitStack() as stack:
        return server.serve_shard(address, StreamOptions.of(settings, token), join=join, announce=announce)


class _Listener(Listener):
    """A server joins the control channel to be watched, and to be notified of failures. Workers notify it themselves when they
    leave, and every partition arrives with its range, so that a change of configuration does not concern it."""

    def __init__(self, on_failure: OnFailure) -> None:
        self._on_failure = on_failure

    def on_failure(self, error: CommschedError) -> None:
        self._on_failure(error)
