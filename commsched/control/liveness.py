"""Who has been silent for too long. Pure: no thread, clock or I/O."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from ..core.errors import PeerTimeout

Peer = TypeVar("Peer", bound=Hashable)


def heartbeat_seconds(fail_after_seconds: float) -> float:
    """How often each end says that it lives."""
    return min(0.5, fail_after_seconds / 5)


def tick_seconds(fail_after_seconds: float) -> float:
    """How often to call :meth:`Liveness.tick`."""
    return heartbeat_seconds(fail_after_seconds) / 4


def too_silent(who: str, silence_seconds: float, fail_after_seconds: float) -> PeerTimeout:
    return PeerTimeout(f"{who} has been silent for {silence_seconds:.1f} s; fail_after is {fail_after_seconds:g} s")


class Liveness(Generic[Peer]):
    """Counts each peer's seconds of silence, but only those in which this process itself was awake to listen.

    After a pause of our own (a stop signal, a library that holds the GIL) what peers said meanwhile is still unread; counting
    that time would blame them for it. So one tick counts at most one heartbeat interval, however late it comes.
    """

    def __init__(self, fail_after_seconds: float, now: float) -> None:
        self._most_per_tick = heartbeat_seconds(fail_after_seconds)
        # A peer that pauses for less than fail_after may be silent for that and one interval, and a tick rounds up.
        self._limit = fail_after_seconds + self._most_per_tick + tick_seconds(fail_after_seconds)
        self._ticked_at = now
        self._silence: dict[Peer, float] = {}

    def heard(self, peer: Peer) -> None:
        """``peer`` lives; the first time, begin to watch it."""
        self._silence[peer] = 0.0

    def forget(self, peer: Peer) -> None:
        self._silence.pop(peer, None)

    def tick(self, now: float) -> list[tuple[Peer, float]]:
        """The peers given up, each with its seconds of silence; they are not watched any more."""
        passed = min(now - self._ticked_at, self._most_per_tick)
        self._ticked_at = now
        for peer in self._silence:
            self._silence[peer] += passed
        overdue = [(peer, silence) for peer, silence in self._silence.items() if silence > self._limit]
        for peer, _ in overdue:
            self.forget(peer)
        return overdue
