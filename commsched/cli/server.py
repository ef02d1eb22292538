"""``commsched server``: a parameter server, joined to the job's control channel, for one job or for one job after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import NoReturn

from ..control.client import ControlClient
from ..control.messages import Member
from ..control.rendezvous import own_host
from ..control.witnessed import Witness
from ..core.errors import CommschedError, ProtocolError, error_text
from ..core.interfaces import OnFailure
from ..core.standard_streams import say_error, say_out
from ..net.tls import identity_of
from ..settings import Settings
from ..transports.backends.ps.frame import WorkerHello
from ..transports.backends.ps.server import Membership, Server
from ..transports.backends.ps.stream import StreamOptions

_JOIN_SECONDS = 10.0


def serve_jobs(address: str, token: str, settings: Settings) -> NoReturn:
    """Serve one job after another at ``address``, however each job ends, and print its end on stderr.

    Raises:
        CommschedError: the server could not start.
    """
    with _open(address, token, settings) as server:
        while True:
            try:
                _serve_job(server, token, settings)
                ended = "has ended"
            except CommschedError as error:
                ended = f"has failed: {error_text(error)}"
            say_error(f"commsched server: the job {ended}; ready for the next")


def serve(address: str, token: str, settings: Settings) -> int:
    """Serve one job at ``address`` and return 0 when every worker has left in good order.

    Raises:
        CommschedError: the job failed, or the server could not start.
    """
    with _open(address, token, settings) as server:
        _serve_job(server, token, settings)
    return 0


@contextmanager
def _open(address: str, token: str, settings: Settings) -> Iterator[Server]:
    """A server, whose address is printed on stdout before any worker is answered."""
    with closing(Server(address, StreamOptions.of(settings, token))) as server:
        say_out(f"commsched server listening on {server.address}")
        yield server


def _serve_job(server: Server, token: str, settings: Settings) -> None:
    def join(hello: WorkerHello, job: str, on_failure: OnFailure) -> Membership:
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
            # The rank that has come has joined there already. An elastic job may have lost rank 0 since, and begins anew.
            join_within_seconds=min(settings.join_within, max(_JOIN_SECONDS, settings.fail_after)),
            waits=False,
            job=job,
            identity=identity_of(settings.security, token, settings.certificates),
        )
        client.when_failed(on_failure)
        return client

    with ExitStack() as stack:
        server.serve_job(join)
