"""Shard: a parameter server that listens; in a rank's process, or alone in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...core.ports import OnFailure
from .carriers import open_port
from .hello import Hello
from .pacer import Pacer
from .service import Service


class Shard:
    """A port around a :class:`Service`; listens from construction on.

    Args:
        address: ``host:port`` to listen at; port 0: any free one.
        token: what everyone who connects must show.
        world_size, on_failure, on_first_hello, on_all_left, members, divisor: see :class:`Service`.
        lane: what carries messages, a name in ``carriers``; that of the workers.
        name: what messages call this server; the address is added.
        pacer: caps what is sent, if given.
        fail_after_seconds: bounds how long a frozen connection lives; the same for all processes of a job.

    Raises:
        ConfigError: the address cannot be listened at, or the token is empty.
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
        pacer: Pacer | None = None,
        fail_after_seconds: float = 10.0,
        on_first_hello: Callable[[Hello], None] = lambda hello: None,
        on_all_left: Callable[[], None] = lambda: None,
        members: Sequence[int] | None = None,
        divisor: int | None = None,
    ) -> None:
        self._port = open_port(lane, address, token, pacer, fail_after_seconds)
        #: ``host:port`` as bound.
        self.address = self._port.address
        #: What this server does with its messages; a rank in the same process calls it.
        self.service = Service(
            f"{name} at {self.address}", world_size, on_failure, on_first_hello, on_all_left, members, divisor
        )
        self._port.serve(self.service.serve)

    def close(self, graceful: bool = True) -> None:
        """Say goodbye to who is still connected, and give back the port and all threads. Idempotent."""
        self.service.close()
        self._port.close(graceful)
