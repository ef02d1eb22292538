"""The network between workers and shards: full-duplex NICs around a switch that is never the bottleneck.

There is one connection for each worker and shard and direction, as the ps transport has. It carries one message at a time,
the most urgent that waits for it, and shares the sender's and the receiver's NIC with the other connections max-min fairly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..core.policies import make_policy
from ..core.scheduler import Scheduler
from .clock import VirtualClock
from .fair_share import Floats
from .nics import Connections
from .scenario import Cluster
from .shares import Shares
from .soon import Soon


@dataclass(slots=True, eq=False)
class _Message:
    priority: int
    nbytes: int
    arrived: Callable[[], None]


def _one_at_a_time() -> Scheduler[_Message]:
    return Scheduler(make_policy("priority"), credit_bytes=0)


@dataclass(slots=True, eq=False)
class _Connection:
    """One direction between each of a worker class and one shard; ``key`` is worker, shard and whether it carries pushes."""

    key: tuple[int, int, bool]
    waiting: Scheduler[_Message] = field(default_factory=_one_at_a_time)
    current: _Message | None = None

    def begin(self) -> bool:
        """Take the next message; False if there is none, or one is under way."""
        if self.current is not None:
            return False
        self.current = self.waiting.next()
        return self.current is not None

    def end(self) -> _Message:
        assert self.current is not None
        message, self.current = self.current, None
        self.waiting.sent(message)
        return message


class Network:
    """Carries messages between the worker classes of ``cluster`` and its shards. Between two events all rates are constant.

    Args:
        shares: of the NICs of ``cluster``.
    """

    def __init__(self, clock: VirtualClock, cluster: Cluster, shares: Shares) -> None:
        self._clock = clock
        self._shares = shares
        self._latency_seconds = cluster.latency_seconds
        self._message_seconds = cluster.message_seconds
        self._hosts = shares.hosts
        self._connections: dict[tuple[int, int, bool], _Connection] = {}
        self._idle: list[_Connection] = []  # may have a message to begin
        # Those under way, and of each the bytes left at the last plan, the arrival foreseen and the rate.
        self._active: list[_Connection] = []
        self._arrays = self._to_arrays([])
        self._left: Floats = np.empty(0)
        self._arrival: Floats = np.empty(0)
        self._rates: Floats = np.empty(0)
        self._plans = 0
        self._plan_soon = Soon(clock, self._plan)

    @property
    def shards(self) -> int:
        return len(self._hosts.shard_rates)

    def members_across(self, worker: int, shard: int) -> int:
        """How many of a class reach ``shard`` through the network: all but the one that hosts it."""
        return self._hosts.members_across(worker, shard)

    def push(self, worker: int, shard: int, order: int, nbytes: int, arrived: Callable[[], None]) -> None:
        """Each of the class sends ``nbytes`` to ``shard``; ``arrived`` is called once, when all that cross are there."""
        self._send(worker, shard, True, _Message(order, nbytes, arrived))

    def reply(self, worker: int, shard: int, order: int, nbytes: int, arrived: Callable[[], None]) -> None:
        """The same from ``shard`` to each of the class."""
        self._send(worker, shard, False, _Message(order, nbytes, arrived))

    def _send(self, worker: int, shard: int, is_push: bool, message: _Message) -> None:
        key = worker, shard, is_push
        connection = self._connections.get(key)
        if connection is None:
            connection = self._connections[key] = _Connection(key)
        connection.waiting.add(message)
        if connection.current is None:
            self._idle.append(connection)
            self._plan_soon()

    def _plan(self) -> None:
        """Begin what can begin, and share the NICs anew from now on."""
        now = self._clock.now
        begun = [connection for connection in self._idle if connection.begin()]
        self._idle.clear()
        self._active += begun
        self._arrays = self._arrays.joined(self._to_arrays(begun))
        moving = self._rates > 0
        self._left[moving] = np.maximum(self._arrival[moving] - now, 0.0) * self._rates[moving]
        self._left = np.concatenate([self._left, [self._load_bytes(connection) for connection in begun]])
        self._plans += 1
        if self._active:
            self._rates = self._shares.rates([each.key for each in self._active], self._arrays)
            seconds = np.full_like(self._left, np.inf)
            self._arrival = now + np.divide(self._left, self._rates, out=seconds, where=self._rates > 0)
            plan = self._plans
            self._clock.call_at(float(self._arrival.min()), lambda: self._arrive(plan))

    def _arrive(self, plan: int) -> None:
        if plan != self._plans:  # the rates have changed since
            return
        now = self._clock.now
        under_way = self._arrival > now * (1 + 1e-12)
        for index in np.flatnonzero(~under_way):
            connection = self._active[index]
            self._clock.call_at(now + self._latency_seconds, connection.end().arrived)
            self._idle.append(connection)
        self._active = [self._active[index] for index in np.flatnonzero(under_way)]
        self._arrays = self._arrays[under_way]
        self._left, self._arrival, self._rates = self._left[under_way], self._arrival[under_way], self._rates[under_way]
        self._plan_soon()

    def _load_bytes(self, connection: _Connection) -> float:
        """A message's bytes, and as many more as the path carries while it is held besides."""
        assert connection.current is not None
        return connection.current.nbytes + self._message_seconds * self._hosts.path_rate(*connection.key[:2])

    def _to_arrays(self, connections: list[_Connection]) -> Connections:
        keys = [each.key for each in connections]
        return Connections(
            np.array([worker for worker, _, _ in keys], np.int64),
            np.array([shard for _, shard, _ in keys], np.int64),
            np.array([is_push for _, _, is_push in keys], bool),
            np.array([self.members_across(worker, shard) for worker, shard, _ in keys], np.int64),
        )
