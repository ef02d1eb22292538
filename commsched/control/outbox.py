"""The queue of messages that one end of a stream still has to send."""

from __future__ import annotations

import threading
from collections import deque

from .messages import Heartbeat, encode

_BEAT = encode(Heartbeat())


class MessageQueue:
    """The iterator from which gRPC takes a stream's outgoing messages: the messages put, in order, and a heartbeat when there
    was no message for ``heartbeat_seconds``. After :meth:`close` it ends when it has yielded all messages put.

    ``put`` and ``close`` never block; any thread. gRPC asks for the next message only when the last one has gone into its
    window, so heartbeats do not pile up for a peer that does not read.
    """

    def __init__(self, heartbeat_seconds: float, thread_name: str | None = None) -> None:
        self._heartbeat_seconds = heartbeat_seconds
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._closed = False
        self._thread_name = thread_name
        self.thread: threading.Thread | None = None  # the thread that takes the messages, once it has begun

    def put(self, data: bytes) -> None:
        """Send ``data``; does nothing if the queue is closed."""
        with self._changed:
            if not self._closed:
                self._queue.append(data)
                self._changed.notify()

    def close(self) -> None:
        """Send the messages put so far, and nothing more. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def discard(self) -> None:
        """The stream is gone: send nothing more, not even the messages put so far."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify()

    def __iter__(self) -> MessageQueue:
        return self

    def __next__(self) -> bytes:
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
        return _BEAT
