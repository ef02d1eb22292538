"""``commsched server``: a parameter server, joined to the job's control channel, for one job or for one job after another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import NoReturn

from ..control.client import ControlClient
from ..control.messages import Member
from ..control.rendezvous import own_host
from ..control.witnessed import Witness
from ..core.errors import CommschedError, ProtocolError
from ..core.interfaces import OnFailure
from ..core.standard_streams import say_error, say_out
from ..net.tls import identity_of
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
        # The server joins to be watched, and to be notified of failures. Workers notify it themselves when they leave, and
        # every partition arrives with its range, so that a change of configuration does not concern it.
        client = ControlClient(
            hello.control_address,
            token,
            Member.server(hello.server, host, witness.address, hello.contributors.divisor),
            fail_after_seconds=settings.fail_after,
            join_within_seconds=settings.join_within,
            job=job,
            identity=identity_of(settings.security, token, settings.certificates),
        )
        client.when_failed(on_failure)
        return client

    with ExitStack() as stack:
        return server.serve_shard(address, StreamOptions.of(settings, token), join=join, announce=announce)
