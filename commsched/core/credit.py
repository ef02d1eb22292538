"""CreditWindow: how many bytes may be committed to the network at a time."""

from __future__ import annotations


class CreditWindow:
    """``in_flight`` bytes out of at most ``limit``; pure, not thread-safe.

    One task is always admitted when nothing is in flight, so a partition larger than the window cannot block for ever.
    A smaller limit never revokes what is in flight; it only stops admitting.
    """

    __slots__ = ("in_flight", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0

    def admits(self, nbytes: int) -> bool:
        return self.in_flight == 0 or self.in_flight + nbytes <= self.limit

    def take(self, nbytes: int) -> None:
        self.in_flight += nbytes

    def give_back(self, nbytes: int) -> None:
        if nbytes > self.in_flight:
            raise AssertionError(f"{nbytes} bytes of credit came back, but only {self.in_flight} are in flight")
        self.in_flight -= nbytes

    def __repr__(self) -> str:
        return f"<CreditWindow {self.in_flight}/{self.limit} B>"
