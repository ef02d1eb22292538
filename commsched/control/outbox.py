"""What one end of a stream still has to send."""

from __future__ import annotations

import threading
from collections import deque

from .messages import Beat, encode

_BEAT = encode(Beat())


class Outbox:
    """The iterator that gRPC takes a stream's outgoing messages from: those put, in order, and a heartbeat when there has been
    none for ``heartbeat_seconds``. It ends, after what was put, when closed.

    ``put`` and ``close`` never block; any thread. gRPC asks for the next message only when the last has gone into its window,
    so nothing piles up for a peer that does not read.
    """

    def __init__(self, heartbeat_seconds: float, thread_name: str | None = None) -> None:
        self._heartbeat_seconds = heartbeat_seconds
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._closed = False
        self._thread_name = thread_name
        self.thread: threading.Thread | None = None  # that takes the messages, once it has begun to

    def put(self, data: bytes) -> None:
        """Send ``data``; nothing happens if the outbox is closed."""
        with self._changed:
            if not self._closed:
                self._queue.append(data)
                self._changed.notify()

    def close(self) -> None:
        """Send what was put, and nothing more. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def discard(self) -> None:
        """The stream is gone: send nothing more, not even what was put."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify()

    def __iter__(self) -> Outbox:
        return self

    def __next__(self) -> bytes:
        if self.thread is None:
            self.thread = threading.current_thread()
            if self._thread_name is not None:
                self.thread.name = self._thread_name  # a client's is gRPC's own thread
        with self._changed:
            if not self._queue and not self._closed:
                self._changed.wait(self._heartbeat_seconds)
            if self._queue:
                return self._queue.popleft()
            if self._closed:
                raise StopIteration
        return _BEAT
