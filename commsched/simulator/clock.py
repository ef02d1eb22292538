"""Virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """A clock whose time advances only from event to event. Not thread-safe.

    Events at the same time happen in the order in which they were scheduled.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def call_at(self, time: float, event: Callable[[], None]) -> None:
        """Schedule ``event`` at ``time``, in seconds.

        Raises:
            ValueError: ``time`` is before :attr:`now`.
        """
        if time < self.now:
            raise ValueError(f"an event at {time} s was asked for at {self.now} s")
        heapq.heappush(self._events, (time, next(self._order), event))

    def run(self) -> None:
        """Run all events, including events that are scheduled meanwhile. Returns when none is left."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


class EndOfInstant:
    """A call schedules ``action`` at the present time, after the events already scheduled for it. Further calls before
    ``action`` runs have no effect.

    All tasks that become ready at one time are therefore known before one of them is chosen.
    """

    def __init__(self, clock: VirtualClock, action: Callable[[], None]) -> None:
        self._clock = clock
        self._action = action
        self._asked = False

    def __call__(self) -> None:
        if not self._asked:
            self._asked = True
            self._clock.call_at(self._clock.now, self._run)

    def _run(self) -> None:
        self._asked = False
        self._action()
