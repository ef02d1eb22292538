"""``commsched server``: the parameter server of one job, joined to the job's control channel."""

from __future__ import annotations

from typing import Any

from .control.client import ControlClient
from .control.member import Member
from .core.config import Settings
from .core.errors import CommschedError, ProtocolError
from .core.ports import OnFailure
from .transports.ps import server
from .transports.ps.hello import Hello


def serve(address: str, token: str, settings: Settings) -> int:
    """Serve one job at ``address`` and return 0 when every worker has left in good order.

    Prints where it listens, on stdout, before any worker can connect.

    Raises:
        CommschedError: why the job failed, or why the server could not start.
    """

    def join(hello: Hello, on_failure: OnFailure) -> server.Membership:
        if hello.control_address is None:
            raise ProtocolError(f"rank {hello.rank} did not say where the control channel is")
        return ControlClient(
            hello.control_address,
            token,
            Member.server(hello.server),
            _Listener(on_failure),
            fail_after_seconds=settings.fail_after,
            join_within_seconds=settings.join_within,
        )

    return server.serve(
        address,
        token,
        join=join,
        announce=lambda bound: print(f"commsched server listening on {bound}", flush=True),
        lane=settings.lane,
        rate_bytes_per_second=settings.rate,
        fail_after_seconds=settings.fail_after,
    )


class _Listener:
    """A server takes part in the control channel to be watched, and to hear of failures."""

    def __init__(self, on_failure: OnFailure) -> None:
        self._on_failure = on_failure

    def on_failure(self, error: CommschedError) -> None:
        self._on_failure(error)

    def on_leave(self, rank: int) -> None:
        """Workers say goodbye to the server themselves."""

    def on_end(self) -> None:
        """As for ``on_leave``."""

    def on_told(self, rank: int, value: Any) -> None:
        """Ranks tell rank 0 only."""

    def on_announced(self, value: Any) -> None:
        """Rank 0 announces to ranks only."""

    def hold_steps(self) -> dict[int, int]:
        """Partitions come with their range, so a change of configuration does not concern a server."""
        return {}

    def switch_at(self, config: dict[str, Any], steps: dict[int, int]) -> None:
        """As for ``hold_steps``."""
