"""The offset between this process's clock and rank 0's. Pure."""

from __future__ import annotations

import math


class ClockOffset:
    """Estimates the offset from the fastest of several round trips (Cristian, 1989). The error is at most half of that round
    trip."""

    def __init__(self) -> None:
        self.round_trips = 0
        self.seconds = 0.0  # add this to this process's clock to get rank 0's
        self._fastest = math.inf

    def add(self, sent_at: float, server_time: float, received_at: float) -> None:
        """Add one round trip: two times of this process's clock and, between them, one time of rank 0's clock."""
        self.round_trips += 1
        if received_at - sent_at < self._fastest:
            self._fastest = received_at - sent_at
            self.seconds = server_time - (sent_at + received_at) / 2
