"""Virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Time that passes only from event to event. Not thread-safe.

    Events of one moment happen in the order in which they were asked for.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def call_at(self, time: float, event: Callable[[], None]) -> None:
        """Let ``event`` happen at ``time``, in seconds, not before :attr:`now`."""
        if time < self.now:
            raise ValueError(f"an event at {time} s was asked for at {self.now} s")
        heapq.heappush(self._events, (time, next(self._order), event))

    def run(self) -> None:
        """Let all events happen, also those that events ask for; returns when none is left."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
