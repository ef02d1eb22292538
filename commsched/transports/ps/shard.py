"""Shard: a parameter server that listens; in a rank's process, or alone in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from ...core.ports import OnFailure
from ...rpc import DaemonExecutor, bind, make_server
from .frame import MAX_MESSAGE_BYTES
from .grpc_lane import METHOD
from .hello import Hello
from .pacer import Pacer
from .service import Service

#: How long streams may take to end in good order when the shard closes.
_GRACE_SECONDS = 1.0


class Shard:
    """A gRPC server around a :class:`Service`; listens from construction on.

    Args:
        address: ``host:port`` to listen at; port 0: any free one.
        token: what everyone who connects must show.
        world_size, pacer, on_failure, on_first_hello, on_all_left: see :class:`Service`.
        name: what messages call this server; the address is added.
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
        on_failure: OnFailure,
        name: str = "the server",
        pacer: Pacer | None = None,
        fail_after_seconds: float = 10.0,
        on_first_hello: Callable[[Hello], None] = lambda hello: None,
        on_all_left: Callable[[], None] = lambda: None,
    ) -> None:
        self._executor = DaemonExecutor("commsched-ps")
        self._grpc_server = make_server(self._executor, token, fail_after_seconds, MAX_MESSAGE_BYTES)
        port = bind(self._grpc_server, address)
        #: ``host:port`` as bound.
        self.address = f"{address.rpartition(':')[0]}:{port}"
        #: What this server does with its messages; a rank in the same process calls it.
        self.service = Service(f"{name} at {self.address}", world_size, pacer, on_failure, on_first_hello, on_all_left)
        _, package, method = METHOD.split("/")
        handler = grpc.stream_stream_rpc_method_handler(self.service.exchange)
        self._grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(package, {method: handler}),))
        self._grpc_server.start()

    def close(self, graceful: bool = True) -> None:
        """Say goodbye to who is still connected, and give back the port and all threads. Idempotent."""
        self.service.close()
        self._grpc_server.stop(_GRACE_SECONDS if graceful else None).wait()
        self.service.join_readers()
        self._executor.shutdown()
