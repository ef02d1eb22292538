"""A member's one stream to rank 0: connected with patience, read by a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc

from ..core.errors import CommschedError, ConfigError, TransportError
from ..rpc import make_channel, token_metadata
from .liveness import heartbeat_seconds
from .messages import MAX_WIRE_BYTES, METHOD, SERVICE
from .outbox import Outbox

_RETRY_SECONDS = 0.1  # between attempts to connect
_FAREWELL_SECONDS = 0.5  # how long close waits for the server to take the last message


class Stream:
    """Sends what is put, and gives ``on_data`` each message that comes, in a thread that :meth:`start` begins.

    Args:
        hello: makes the first message; called for each attempt to connect.
        on_end: told that the stream ended and why (the error of gRPC, None if the server ended it in order); True asks for
            another attempt.
    """

    def __init__(
        self,
        address: str,
        token: str,
        fail_after_seconds: float,
        *,
        hello: Callable[[], bytes],
        on_data: Callable[[bytes], None],
        on_end: Callable[[grpc.RpcError | None], bool],
    ) -> None:
        self._metadata = token_metadata(token)
        self._heartbeat_seconds = heartbeat_seconds(fail_after_seconds)
        self._hello = hello
        self._on_data = on_data
        self._on_end = on_end
        self._changed = threading.Condition()
        self._closed = False
        self._call: Any = None
        self._outbox = Outbox(self._heartbeat_seconds)
        self._channel = make_channel(address, fail_after_seconds, MAX_WIRE_BYTES)
        self._method = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._thread = threading.Thread(target=self._run, name="commsched-control-receive", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Send ``data``; never blocks. Any thread."""
        self._outbox.put(data)

    def finish(self) -> None:
        """Send nothing more than what was put. Never blocks; any thread."""
        self._outbox.close()

    def close(self) -> None:
        """Send what was put, then end connection and threads. Idempotent; any thread but the stream's own."""
        with self._changed:
            self._closed = True
            self._outbox.close()
            self._changed.notify_all()
            call = self._call
        self._thread.join(_FAREWELL_SECONDS)  # the server answers the end of our side with its last message
        if call is not None:
            call.cancel()
        self._channel.close()
        self._thread.join()
        if self._outbox.thread is not None:  # gRPC's: not ours to wait for without limit
            self._outbox.thread.join(_FAREWELL_SECONDS)

    def _run(self) -> None:
        while self._converse():
            with self._changed:
                self._changed.wait_for(lambda: self._closed, _RETRY_SECONDS)

    def _converse(self) -> bool:
        """One attempt; True if there is to be another."""
        outbox = Outbox(self._heartbeat_seconds, "commsched-control-send")
        outbox.put(self._hello())
        with self._changed:
            if self._closed:
                return False
            self._outbox = outbox
            self._call = call = self._method(outbox, metadata=self._metadata)
        error = None
        try:
            for data in call:
                self._on_data(data)
        except grpc.RpcError as broken:
            error = broken
        outbox.discard()
        return self._on_end(error)


def refusal(error: grpc.RpcError | None, address: str) -> CommschedError | None:
    """Why it is of no use to try again to connect to ``address``; None if rank 0 may still come up there."""
    if error is None:
        return TransportError(f"what listens at {address} ended the control channel without a word")
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        return None
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return ConfigError(f"rank 0 at {address} refuses this token; set the same COMMSCHED_TOKEN on every rank")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ConfigError(f"what listens at {address} is not commsched's control channel; is COMMSCHED_CONTROL right?")
    return TransportError(f"rank 0 at {address} cannot be joined: {code.name}: {error.details()}")
