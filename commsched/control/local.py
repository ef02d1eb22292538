"""The control channel of ranks that are threads of one process: what ``client.py`` is over a network."""

from __future__ import annotations

import math
import threading

from ..version import __version__
from .end import ControlEnd
from .messages import PROTOCOL, Hello, Member, decode, encode
from .roster import Roster


class LocalControlWorld:
    """The roster of the ranks of one process. All of them have joined, but none is watched: their process lives as long as this
    object."""

    def __init__(self, world_size: int) -> None:
        self.changed = threading.Condition()  # guards the roster and every rank's end
        self._roster = Roster(world_size, "", 0, fail_after_seconds=math.inf, join_within_seconds=math.inf, now=0.0)
        self.ends = [LocalControl(self, Member.thread(rank, world_size)) for rank in range(world_size)]
        for rank in range(world_size):
            self._roster.received(rank, Hello(__version__, PROTOCOL, Member.thread(rank, world_size), math.inf), 0.0)

    def received(self, rank: int, data: bytes) -> None:
        """``rank`` sent ``data``. Called with ``changed`` held: all ranks receive messages in the order of the decisions."""
        for send in [*self._roster.received(rank, decode(data), 0.0), *self._roster.tell_left()]:
            reply = encode(send.message)
            for connection in send.connections:
                self.ends[connection]._received(decode(reply))  # each rank gets values of its own


class LocalControl(ControlEnd):
    """One rank's end. Its listener is called in a thread of its own, which the only rank of a world does not need."""

    def __init__(self, world: LocalControlWorld, member: Member) -> None:
        super().__init__(member, world.changed, lazily=True)
        self._world = world
        self._callbacks.start()

    def _put(self, data: bytes) -> None:
        with self._changed:
            self._world.received(self._member.index, data)
