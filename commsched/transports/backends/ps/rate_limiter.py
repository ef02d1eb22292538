"""An optional cap on the sending rate of a process: an emulated link that all its streams share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from ....core.policies import make_policy
from ....core.scheduler import Scheduler


@dataclass(slots=True, eq=False)
class _Transfer:
    """A message that waits for the emulated link, or crosses it."""

    priority: int  # the ``order`` given to ``submit``
    nbytes: int
    queued_at: float
    release: Callable[[], None]


class EmulatedLink:
    """The emulated link. Pure: the caller passes the time in seconds, and nothing waits. Not thread-safe.

    The link carries one message at a time. When it becomes free it takes the message of smallest order, and is busy for
    ``nbytes / rate`` seconds. Its clock is absolute: the next message begins when the one before ended, however late the caller
    advances the link, so lateness does not add up.
    """

    def __init__(self, rate_bytes_per_second: float) -> None:
        self._rate = rate_bytes_per_second
        self._waiting: Scheduler[_Transfer] = Scheduler(make_policy("priority"), credit_bytes=0)  # no credit: one at a time
        self._current: _Transfer | None = None
        self._free_at = 0.0

    def submit(self, order: int, nbytes: int, release: Callable[[], None], now: float) -> None:
        """Queue a message. ``advance`` returns its ``release`` when its last byte has left."""
        self._waiting.add(_Transfer(order, nbytes, now, release))

    def charge(self, nbytes: int, now: float) -> None:
        """Account for a message that is too small to wait its turn."""
        self._free_at = max(self._free_at, now) + nbytes / self._rate

    def advance(self, now: float) -> tuple[list[Callable[[], None]], float | None]:
        """Return the ``release`` of each message that has left by ``now``, in order, and the time when the next message will
        have left, or None if the link is idle."""
        released: list[Callable[[], None]] = []
        while True:
            if self._current is None:
                self._current = self._waiting.next()
                if self._current is None:
                    return released, None
                self._free_at = max(self._free_at, self._current.queued_at) + self._current.nbytes / self._rate
            if self._free_at > now:
                return released, self._free_at
            released.append(self._current.release)
            self._waiting.sent(self._current)
            self._current = None


class RateLimiter:
    """An :class:`EmulatedLink` in real time, with one thread. A message is released when its last byte would have left."""

    def __init__(self, rate_bytes_per_second: float) -> None:
        self._link = EmulatedLink(rate_bytes_per_second)
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="commsched-pacer", daemon=True)
        self._thread.start()

    def submit(self, order: int, nbytes: int, release: Callable[[], None]) -> None:
        """Queue a message. The pacer's thread calls ``release`` when the message may leave. Never blocks. Thread-safe."""
        with self._changed:
            self._link.submit(order, nbytes, release, monotonic())
            self._changed.notify()

    def charge(self, nbytes: int) -> None:
        """Account for a message that is sent at once."""
        with self._changed:
            self._link.charge(nbytes, monotonic())

    def close(self) -> None:
        """End the thread, and drop the waiting messages. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while True:
                    if self._closed:
                        return
                    now = monotonic()
                    released, next_at = self._link.advance(now)
                    if released:
                        break
                    self._changed.wait(None if next_at is None else next_at - now)
            for release in released:
                release()
