"""How far this process's clock is from rank 0's. Pure."""

from __future__ import annotations

import math


class ClockOffset:
    """The estimate of the fastest of several round trips (Cristian, 1989): its error is at most half of that round trip."""

    def __init__(self) -> None:
        self.round_trips = 0
        self.seconds = 0.0  # to add to this process's clock
        self._fastest = math.inf

    def add(self, sent_at: float, server_time: float, received_at: float) -> None:
        """One round trip: two times of this process's clock and, between them, one of rank 0's."""
        self.round_trips += 1
        if received_at - sent_at < self._fastest:
            self._fastest = received_at - sent_at
            self.seconds = server_time - (sent_at + received_at) / 2
