"""PushPriority: a rank's own pushes leave before the replies of its shard, which share the rank's link."""

from __future__ import annotations

import threading
from collections.abc import Callable


class PushPriority:
    """Taken while a push of this rank is leaving. A stream that gives way checks ``is_free`` before each reply.

    All ranks wait for a push, but only one rank waits for a reply. If both share the link equally, replies of layers that are
    needed last delay the pushes of front layers. In simulation and on shaped links that costs 4 to 8 % of a step. There is no
    deadlock, because a push never waits for a reply to leave. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0
        self._waiting: list[Callable[[], None]] = []

    @property
    def is_free(self) -> bool:
        return self._taken == 0

    def take(self) -> None:
        with self._lock:
            self._taken += 1

    def give_back(self) -> None:
        with self._lock:
            self._taken -= 1
            waiting = list(self._waiting) if self._taken == 0 else []
        for when_free in waiting:
            when_free()

    def add(self, when_free: Callable[[], None]) -> None:
        """Call ``when_free`` each time no push is leaving any more."""
        with self._lock:
            self._waiting.append(when_free)

    def remove(self, when_free: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.remove(when_free)

    def __repr__(self) -> str:
        return f"<PushPriority {self._taken} pushes leaving, {len(self._waiting)} streams give way>"
