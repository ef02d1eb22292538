"""Reads the times of messages: which peers have been silent for too long, and how far this process's clock is from rank
0's. Pure: no thread, clock or I/O."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

from ..core.errors import PeerTimeout
from .messages import Member

Peer = TypeVar("Peer", bound=Hashable)


#: Rank 0 gets at most this many heartbeats per second, and sends as many, as long as the interval may grow with the job.
_MAX_HEARTBEATS = 256


def heartbeat_seconds(fail_after_seconds: float, world_size: int = 0) -> float:
    """The interval at which each end sends heartbeats, in a job of ``world_size`` ranks. Without that number it is the interval
    of a small job."""
    return min(max(0.5, world_size / _MAX_HEARTBEATS), fail_after_seconds / 5)


def tick_seconds(fail_after_seconds: float, world_size: int = 0) -> float:
    """The interval at which to call :meth:`FailureDetector.tick`."""
    return heartbeat_seconds(fail_after_seconds, world_size) / 4


def too_silent(member: Member, silence_seconds: float, fail_after_seconds: float) -> PeerTimeout:
    text = f"{member} has been silent for {silence_seconds:.1f} s; fail_after is {fail_after_seconds:g} s"
    return PeerTimeout(text, **member.about)


class FailureDetector(Generic[Peer]):
    """Counts each peer's seconds of silence, but only the seconds in which this process itself was able to listen.

    After a pause of this process (a stop signal, a library that holds the GIL), the peers' messages of that time are still
    unread; counting the pause would blame the peers for it. So one tick counts at most one heartbeat interval, however late it
    comes.
    """

    def __init__(self, fail_after_seconds: float, now: float, world_size: int = 0) -> None:
        self._most_per_tick = heartbeat_seconds(fail_after_seconds, world_size)
        # A peer that pauses for less than fail_after may be silent for that time and one interval; a tick rounds up.
        self._limit = fail_after_seconds + self._most_per_tick + tick_seconds(fail_after_seconds, world_size)
        self._doubt_after = fail_after_seconds / 2
        self._ticked_at = now
        self._silence: dict[Peer, float] = {}

    def heard(self, peer: Peer) -> None:
        """``peer`` is alive. The first call begins to watch it."""
        self._silence[peer] = 0.0

    def forget(self, peer: Peer) -> None:
        self._silence.pop(peer, None)

    def doubtful(self) -> list[Peer]:
        """The peers that have been silent for half of ``fail_after``."""
        return [peer for peer, silence in self._silence.items() if silence > self._doubt_after]

    def tick(self, now: float) -> list[tuple[Peer, float]]:
        """Count the time since the last tick. Returns the peers that are given up, each with its seconds of silence; they are
        no longer watched."""
        passed = min(now - self._ticked_at, self._most_per_tick)
        self._ticked_at = now
        for peer in self._silence:
            self._silence[peer] += passed
        overdue = [(peer, silence) for peer, silence in self._silence.items() if silence > self._limit]
        for peer, _ in overdue:
            self.forget(peer)
        return overdue


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
