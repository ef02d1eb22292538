"""Shard: a parameter server that listens, in a rank's process or in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....core.interfaces import OnFailure
from .carriers import open_port
from .frame import WorkerHello
from .rate_limiter import RateLimiter
from .service import Service


class Shard:
    """A port around a :class:`Service`. It listens from construction on.

    Args:
        address: ``host:port`` to listen at; port 0 means any free port.
        token: the job's secret, which every connecting process must prove.
        world_size, on_failure, on_first_hello, on_all_left, members, divisor, job: see :class:`Service`.
        lane: the carrier of messages, ``tcp`` or ``grpc`` (see ``carriers``); the same as the workers'.
        name: the name of this server in messages; the address is added.
        pacer: caps the rate of sending, if given.
        fail_after_seconds: bounds how long a frozen connection lives; the same for all processes of a job.

    Raises:
        ConfigError: the shard cannot listen at the address, or the token is empty.
    """

    def __init__(
        self,
        address: str,
        token: str,
        world_size: int | None,
        *,
        lane: str = "tcp",
        on_failure: OnFailure,
        name: str = "the server",
        pacer: RateLimiter | None = None,
        fail_after_seconds: float = 10.0,
        on_first_hello: Callable[[WorkerHello], None] = lambda hello: None,
        on_all_left: Callable[[], None] = lambda: None,
        members: Sequence[int] | None = None,
        divisor: int | None = None,
        job: str | None = None,
    ) -> None:
        self._port = open_port(lane, address, token, pacer, fail_after_seconds)
        #: ``host:port`` as bound.
        self.address = self._port.address
        #: Handles the messages of this server. A rank in the same process calls it directly.
        self.service = Service(
            f"{name} at {self.address}", world_size, on_failure, on_first_hello, on_all_left, members, divisor, job
        )
        self._port.serve(self.service.serve)

    def close(self, graceful: bool = True) -> None:
        """Say goodbye to the workers that are still connected, and release the port and all threads. Idempotent."""
        self.service.close()
        self._port.close(graceful)
