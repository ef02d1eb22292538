"""A job of any size in virtual time: rank 0's roster, and the heartbeats of all its members."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heapreplace

from commsched.control.liveness import heartbeat_seconds, tick_seconds
from commsched.control.messages import PROTOCOL, Heartbeat, Hello, Member
from commsched.control.roster import Roster, Send
from commsched.version import __version__


class VirtualJob:
    """A job of ``size`` ranks, each of which joins at time 0. The connection of a rank has the number of the rank.

    ``received`` and ``sent`` count the messages that went through rank 0's server. What a member of the server sends while it
    has nothing else to say, the server sends to each member as often; those are counted, too.
    """

    def __init__(self, size: int, fail_after_seconds: float = 10.0) -> None:
        self.size = size
        self.now = 0.0
        self.received = self.sent = 0
        self.interval = heartbeat_seconds(fail_after_seconds, size)
        self._tick = tick_seconds(fail_after_seconds, size)
        self.roster = Roster(size, "h", 1, fail_after_seconds=fail_after_seconds, join_within_seconds=60.0, now=0.0)
        for rank in range(size):
            self.put(rank, Hello(__version__, PROTOCOL, Member("rank", rank, size, f"h{rank // 8}", rank), 60.0))

    def put(self, rank: int, message: object) -> list[Send]:
        """``rank`` sends ``message`` now."""
        self.received += 1
        sends = self.roster.received(rank, message, self.now)  # type: ignore[arg-type]
        self.sent += sum(len(send.connections) for send in sends)
        return sends

    def pass_time(self, seconds: float, silent: Collection[int] = ()) -> float | None:
        """Let ``seconds`` pass, in which all ranks but the ``silent`` ones send heartbeats. Returns when the job failed."""
        ends_at = self.now + seconds
        beat, due = (
            Heartbeat(),
            [(self.now + self.interval * (1 + rank) / self.size, rank) for rank in range(self.size) if rank not in silent],
        )
        heapify(due)
        while self.now < ends_at:
            self.now += self._tick
            while due[0][0] <= self.now:
                at, rank = due[0]
                self.put(rank, beat)
                self.sent += 1
                heapreplace(due, (at + self.interval, rank))
            self.sent += sum(len(send.connections) for send in self.roster.tick(self.now))
            if self.roster.failure is not None:
                return self.now
        return None
