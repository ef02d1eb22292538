"""A clock for emulated models and layer timers, on which only sleeping takes time."""

from __future__ import annotations


class FakeClock:
    """Sleeps last ``overslept_seconds`` longer than asked."""

    def __init__(self, overslept_seconds: float = 0.0) -> None:
        self.time = 0.0
        self.sleeps: list[float] = []
        self.overslept_seconds = overslept_seconds

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.sleeps.append(seconds)
        self.time += seconds + self.overslept_seconds

    def seconds(self, moments):
        return list(moments)
