"""Rank 0's own stream. The server is in rank 0's process, so the messages need no socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import grpc

from ..net.rpc import Unproven
from .liveness import heartbeat_seconds
from .messages import Heartbeat, encode
from .server import ControlServer

_BEAT = encode(Heartbeat())


class InProcessStream:
    """Has the interface of :class:`~.stream.Stream`, but ``put`` lets ``server`` decide at once, in the caller's thread.

    Every value that another rank sends to rank 0, or that rank 0 announces, takes this stream on half of its way.
    """

    def __init__(
        self,
        server: ControlServer,
        fail_after_seconds: float,
        *,
        hello: Callable[[], bytes],
        on_data: Callable[[bytes], None],
        on_end: Callable[[grpc.RpcError | Unproven | RuntimeError | None], bool],
    ) -> None:
        self._connection = server.connect()
        self._heartbeat_seconds = heartbeat_seconds(fail_after_seconds)
        self._hello = hello
        self._on_data = on_data
        self._on_end = on_end
        self._thread = threading.Thread(target=self._run, name="commsched-control-receive", daemon=True)

    def start(self) -> None:
        self._connection.received(self._hello())
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Send ``data``; never blocks. Any thread."""
        self._connection.received(data)

    def finish(self) -> None:
        """Send nothing more. Never blocks; any thread."""
        self._connection.finish()

    def close(self) -> None:
        """End the connection and the thread. Idempotent; any thread but the stream's own."""
        self._connection.finish()
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def _run(self) -> None:
        beat_at = 0.0
        for data in self._connection.outbox:
            now = time.monotonic()
            if now >= beat_at:  # the server gives up any silent member, even in its own process
                beat_at = now + self._heartbeat_seconds
                self._connection.received(_BEAT)
            self._on_data(data)
        self._connection.ended()
        self._on_end(None)
