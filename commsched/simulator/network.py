"""The network between workers and shards: full-duplex NICs around a switch that is never the bottleneck.

There is one connection per worker, shard and direction, as in the ps transport. A connection carries one message at a time,
the most urgent of its waiting messages. It shares the NICs of the sender and the receiver with the other connections, max-min
fairly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..core.policies import make_policy
from ..core.scheduler import Scheduler
from .clock import EndOfInstant, VirtualClock
from .network_sharing import CONNECTION, Connections, FairShareCache, FloatArray
from .scenario import Cluster


@dataclass(slots=True, eq=False)
class _Message:
    priority: int
    nbytes: int
    arrived: Callable[[], None]
    left: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class _Connection:
    """One direction between one shard and each worker of a class.

    ``key``: the index of the worker class, the shard, and whether the connection carries pushes.
    ``waiting`` starts one message at a time.
    """

    key: tuple[int, int, bool]
    waiting: Scheduler[_Message] = field(default_factory=lambda: Scheduler(make_policy("priority"), credit_bytes=0))
    current: _Message | None = None

    def begin(self) -> bool:
        """Take the next message. Return False if there is none, or if a message is being sent already."""
        if self.current is not None:
            return False
        self.current = self.waiting.next()
        return self.current is not None

    def end(self) -> _Message:
        assert self.current is not None
        message, self.current = self.current, None
        self.waiting.sent(message)
        return message


class SimulatedNetwork:
    """Carries messages between the worker classes of ``cluster`` and its shards. Between two events all rates are constant.

    Args:
        shares: computes how connections share the NICs of ``cluster``.
    """

    def __init__(self, clock: VirtualClock, cluster: Cluster, shares: FairShareCache) -> None:
        self._clock = clock
        self._shares = shares
        self._latency_seconds = cluster.latency_seconds
        self._message_seconds = cluster.message_seconds
        self._hosts = shares.hosts
        self._connections: dict[tuple[int, int, bool], _Connection] = {}
        self._idle: list[_Connection] = []  # connections that may have a message to begin
        # The connections that are sending; for each the bytes left at the last plan, the expected arrival and the rate.
        self._active: list[_Connection] = []
        self._rows = self._to_rows([])
        self._left: FloatArray = np.empty(0)
        self._arrival: FloatArray = np.empty(0)
        self._rates: FloatArray = np.empty(0)
        self._plans = 0
        self._plan_soon = EndOfInstant(clock, self._plan)

    @property
    def shards(self) -> int:
        return len(self._hosts.shard_rates)

    def members_across(self, worker: int, shard: int) -> int:
        """Return how many workers of a class reach ``shard`` through the network: all but the worker that hosts it."""
        return self._hosts.members_across(worker, shard)

    def push(
        self, worker: int, shard: int, order: int, nbytes: int, left: Callable[[], None], arrived: Callable[[], None]
    ) -> None:
        """Send ``nbytes`` from each worker of the class to ``shard``. ``left`` is called once, when the bytes of all have left,
        and ``arrived`` one latency later."""
        self._send(worker, shard, True, _Message(order, nbytes, arrived, left))

    def reply(self, worker: int, shard: int, order: int, nbytes: int, arrived: Callable[[], None]) -> None:
        """Send ``nbytes`` from ``shard`` to each worker of the class. ``arrived`` is called once, when all have arrived."""
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
        """Begin every message that can begin, and compute new rates for all connections."""
        now = self._clock.now
        begun = [connection for connection in self._idle if connection.begin()]
        self._idle.clear()
        self._active += begun
        self._rows = np.concatenate([self._rows, self._to_rows(begun)])
        moving = self._rates > 0
        self._left[moving] = np.maximum(self._arrival[moving] - now, 0.0) * self._rates[moving]
        self._left = np.concatenate([self._left, [self._load_bytes(connection) for connection in begun]])
        self._plans += 1
        if self._active:
            self._rates = self._shares.rates([each.key for each in self._active], self._rows)
            seconds = np.full_like(self._left, np.inf)
            self._arrival = now + np.divide(self._left, self._rates, out=seconds, where=self._rates > 0)
            plan = self._plans
            self._clock.call_at(float(self._arrival.min()), lambda: self._arrive(plan))

    def _arrive(self, plan: int) -> None:
        if plan != self._plans:  # the rates have changed since this event was scheduled
            return
        now = self._clock.now
        under_way = self._arrival > now * (1 + 1e-12)
        for index in np.flatnonzero(~under_way):
            connection = self._active[index]
            message = connection.end()
            self._clock.call_at(now + self._latency_seconds, message.arrived)
            if message.left is not None:
                self._clock.call_at(now, message.left)
            self._idle.append(connection)
        self._active = [self._active[index] for index in np.flatnonzero(under_way)]
        self._rows = self._rows[under_way]
        self._left, self._arrival, self._rates = self._left[under_way], self._arrival[under_way], self._rates[under_way]
        self._plan_soon()

    def _load_bytes(self, connection: _Connection) -> float:
        """Return the message's bytes, plus the bytes that the path would carry in ``message_seconds``."""
        assert connection.current is not None
        return connection.current.nbytes + self._message_seconds * self._hosts.path_rate(*connection.key[:2])

    def _to_rows(self, connections: list[_Connection]) -> Connections:
        keys = [each.key for each in connections]
        return np.array([(*key, self.members_across(*key[:2])) for key in keys], CONNECTION)
