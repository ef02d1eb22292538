"""One stream of messages: the queue that either end sends from, and a member's only stream to rank 0, which retries until
connected and has a reading thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import grpc

from ..core.errors import CommschedError, ConfigError, TransportError
from ..net.rpc import Call, Unproven, make_channel, said_by
from ..net.tls import Identity, probe
from .messages import MAX_WIRE_BYTES, METHOD, SERVICE, Heartbeat, Message, encode

T = TypeVar("T")

BEAT = encode(Heartbeat())

_RETRY_SECONDS = 0.1  # between attempts to connect
_PROBE_SECONDS = 2.0  # longest time to find out why the server does not answer
_FAREWELL_SECONDS = 0.5  # longest time that close waits for the server to take the last message


class ControlStream:
    """Sends the messages put, and passes each received message to ``on_data``, in a thread that :meth:`start` begins.

    Args:
        hello: makes the first message; called for each attempt to connect.
        beat_seconds: the interval of heartbeats.
        on_end: called when the stream has ended, with the reason: gRPC's error, ``Unproven``, RuntimeError if gRPC can start no
            thread, or None if the server ended the stream in order. It returns True to ask for another attempt.
        identity: this process's, over TLS.
    """

    def __init__(
        self,
        address: str,
        token: str,
        job: str,
        fail_after_seconds: float,
        beat_seconds: float,
        *,
        hello: Callable[[], Message],
        on_data: Callable[[bytes], None],
        on_end: Callable[[grpc.RpcError | Unproven | RuntimeError | None], bool],
        identity: Identity | None = None,
    ) -> None:
        self._address = address
        self._identity = identity
        self._token = token
        self._job = job
        self._heartbeat_seconds = beat_seconds
        self._hello = hello
        self._on_data = on_data
        self._on_end = on_end
        self._changed = threading.Condition()
        self._closed = False
        self._call: Call | None = None
        self._outbox = MessageQueue(self._heartbeat_seconds, BEAT)
        self._channel = make_channel(address, fail_after_seconds, MAX_WIRE_BYTES, identity)
        self._thread = threading.Thread(target=self._run, name="commsched-control-receive", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: Message) -> None:
        """Send ``message``; never blocks. Any thread."""
        self._outbox.put(encode(message))

    def finish(self) -> None:
        """Send the messages put so far, and nothing more. Never blocks; any thread."""
        self._outbox.close()

    def close(self) -> None:
        """Send the messages put so far, then end the connection and the threads. Idempotent; any thread but the stream's
        own."""
        with self._changed:
            self._closed = True
            self._outbox.close()
            self._changed.notify_all()
            call = self._call
        if self._thread.ident is None:  # the thread could not be started
            self._channel.close()
            return
        self._thread.join(_FAREWELL_SECONDS)  # the server answers the end of our side with its last message
        if call is not None:
            call.cancel()
        self._channel.close()
        self._thread.join()
        if self._outbox.thread is not None:  # gRPC's own thread: we do not wait for it without a limit
            self._outbox.thread.join(_FAREWELL_SECONDS)

    def _run(self) -> None:
        while self._converse():
            with self._changed:
                self._changed.wait_for(lambda: self._closed, _RETRY_SECONDS)

    def _converse(self) -> bool:
        """Make one attempt to connect; return True if there should be another."""
        outbox = MessageQueue(self._heartbeat_seconds, BEAT, "commsched-control-send")
        outbox.put(encode(self._hello()))
        with self._changed:
            if self._closed:
                return False
            self._outbox = outbox
            self._call = call = Call(
                self._channel, f"/{SERVICE}/{METHOD}", outbox, self._token, self._job, identity=self._identity
            )
        error: grpc.RpcError | Unproven | RuntimeError | None = None
        try:
            if self._identity is not None:
                self._require_fitting()
            for data in call:
                self._on_data(data)
        except (grpc.RpcError, Unproven, RuntimeError) as broken:  # RuntimeError: gRPC can start no thread
            error = broken
        if self._identity is None and isinstance(error, grpc.RpcError) and _was_cut(error):
            try:
                self._require_fitting()
            except Unproven as found:
                error = found
        outbox.close(discard=True)
        return self._on_end(error)

    def _require_fitting(self) -> None:
        """Raises Unproven if one of the two ends uses TLS and the other does not, or if they belong to different jobs. gRPC
        reports that like a server that is not up yet."""
        try:
            why = probe(self._address, self._identity, _PROBE_SECONDS)
        except OSError:
            return  # it is not up
        if why is not None:
            raise Unproven(why)


def _was_cut(error: grpc.RpcError) -> bool:
    """Whether the server accepted the connection and then ended it, as one that speaks TLS does."""
    said = said_by(error)
    return error.code() is grpc.StatusCode.UNAVAILABLE and ("Socket closed" in said or "reset by peer" in said)


def refusal(error: grpc.RpcError | Unproven | RuntimeError | None, address: str) -> CommschedError | None:
    """The error because of which it is useless to connect to ``address`` again; None if rank 0 may still come up there."""
    if error is None:
        return TransportError(f"the program that listens at {address} ended the control channel without a message")
    if isinstance(error, Unproven):
        return ConfigError(f"the program that listens at {address} {error}")
    if isinstance(error, RuntimeError):
        return TransportError(f"rank 0 at {address} cannot be joined: {error}")
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        return None
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return ConfigError(f"rank 0 at {address} refuses this process: {said_by(error)}; give each job an address of its own")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return ConfigError(f"rank 0 at {address} refuses this token; set the same COMMSCHED_TOKEN on every rank")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ConfigError(
            f"the program that listens at {address} is not commsched's control channel; is COMMSCHED_CONTROL right?"
        )
    return TransportError(f"rank 0 at {address} cannot be joined: {code.name}: {said_by(error)}")


class MessageQueue(Generic[T]):
    """The iterator from which gRPC takes a stream's outgoing messages: the messages put, in order, and ``beat`` when there was
    no message for ``heartbeat_seconds``. After :meth:`close` it ends when it has yielded all messages put.

    ``put`` and ``close`` never block; any thread. gRPC asks for the next message only when the last one has gone into its
    window, so heartbeats do not pile up for a peer that does not read.
    """

    def __init__(self, heartbeat_seconds: float, beat: T, thread_name: str | None = None) -> None:
        self._beat = beat
        self._heartbeat_seconds = heartbeat_seconds
        self._changed = threading.Condition()
        self._queue: deque[T] = deque()
        self._closed = False
        self._thread_name = thread_name
        self.thread: threading.Thread | None = None  # the thread that takes the messages, once it has begun

    def put(self, message: T) -> None:
        """Send ``message``; does nothing if the queue is closed."""
        with self._changed:
            if not self._closed:
                self._queue.append(message)
                self._changed.notify()

    def close(self, *, discard: bool = False) -> None:
        """Send the messages put so far, and nothing more; with ``discard``, not even those: the stream is gone. Idempotent."""
        with self._changed:
            self._closed = True
            if discard:
                self._queue.clear()
            self._changed.notify()

    def __iter__(self) -> MessageQueue[T]:
        return self

    def __next__(self) -> T:
        if self.thread is None:
            self.thread = threading.current_thread()
            if self._thread_name is not None:
                self.thread.name = self._thread_name  # gRPC's own thread, on a client
        with self._changed:
            if not self._queue and not self._closed:
                self._changed.wait(self._heartbeat_seconds)
            if self._queue:
                return self._queue.popleft()
            if self._closed:
                raise StopIteration
        return self._beat
