"""Counts rank 0's messages for agreement in jobs of many ranks, and its processor time for them. No network, one thread.

All ranks run here, with the order and the control channel's decisions as they are, and messages that are encoded and decoded
as on the way. A step is a backward pass: one layer after another becomes ready on all ranks, in another order of ranks each
time, while the network sends partitions, and after the last layer it sends the rest. Processor time is that of rank 0's part,
without gRPC and the kernel, which take longer for each message than all of this (``docs/transports.md``).
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from commsched.control.messages import (
    PROTOCOL,
    Announce,
    Announced,
    FromRank,
    Hello,
    Member,
    Message,
    ToRank0,
    decode,
    encode,
    to_json,
)
from commsched.control.roster import Roster
from commsched.core.interfaces import ORDER
from commsched.core.order.agreed import AgreedOrder
from commsched.core.order.static import STABLE_STEPS
from commsched.core.plan import Partition
from commsched.core.policies import make_policy
from commsched.core.task import CommTask
from commsched.version import __version__

_LAYERS, _PARTITIONS, _NBYTES = 24, 10, 1000
#: Partitions that the network sends from one layer of backward to the next: so 144 of 240 are left when backward is over.
_SENT_PER_LAYER = 4
_CREDIT = 4  # partitions
_STEPS = 5


@dataclass
class Cost:
    """The cost of one launch at rank 0: messages that it received and sent (one for each other rank), and processor time."""

    received: float
    sent: float
    cpu_microseconds: float


def measure(ranks: int, order: str, per_host: int = 1) -> Cost:
    """The cost in a job of so many ``ranks``, of which so many share a host (``per_host``) and sum first, with that setting
    ``order``."""
    job = _Job(ranks, per_host, freeze=order == "static")
    for step in range(STABLE_STEPS + 2):
        job.step(step)
    job.counts.clear()
    job.cpu_seconds = 0.0
    for step in range(STABLE_STEPS + 2, STABLE_STEPS + 2 + _STEPS):
        job.step(step)
    launches = _STEPS * _LAYERS * _PARTITIONS
    return Cost(job.counts["received"] / launches, job.counts["sent"] / launches, 1e6 * job.cpu_seconds / launches)


class _Job:
    def __init__(self, ranks: int, per_host: int, freeze: bool) -> None:
        self._ranks = ranks
        self._chance = random.Random(ranks)
        policy, credit = make_policy("priority"), _CREDIT * _NBYTES
        self._leaders = [rank - rank % per_host for rank in range(ranks)]
        self._orders = [AgreedOrder(rank, self._leaders, policy, credit, freeze=freeze) for rank in range(ranks)]
        self._collecting: dict[tuple[int, int, int], CommTask] = {}  # by leader, step and partition
        self._contributed: Counter[tuple[int, int, int]] = Counter()
        self._to_settle: set[int] = set()  # leaders that have got contributions, which come together
        for order in self._orders:
            order.add_group(0, _LAYERS * _PARTITIONS * _NBYTES, may_freeze=True)
        self._roster = Roster(ranks, "", 0, fail_after_seconds=1e9, join_within_seconds=1e9, now=0.0)
        for rank in range(ranks):
            self._roster.received(rank, Hello(__version__, PROTOCOL, Member.thread(rank, ranks), 1e9), 0.0)
        self._wires: deque[tuple[int, Message | bytes]] = deque()  # receiver and message
        self._started: list[deque[CommTask]] = [deque() for _ in range(ranks)]
        self.counts: Counter[str] = Counter()
        self.cpu_seconds = 0.0

    def step(self, step: int) -> None:
        for layer in reversed(range(_LAYERS)):
            for rank in self._chance.sample(range(self._ranks), self._ranks):
                with self._of_rank_0(rank):
                    for index in range(layer * _PARTITIONS, (layer + 1) * _PARTITIONS):
                        at = Partition(index, "uint8", index * _NBYTES, (index + 1) * _NBYTES, (layer,))
                        self._orders[rank].add(CommTask(0, step, at, memoryview(b"")))
                    self._settle(rank)
                for leader in self._to_settle:
                    with self._of_rank_0(leader):
                        self._settle(leader)
                self._to_settle.clear()
            self._deliver()
            for _ in range(_SENT_PER_LAYER):
                self._send_a_partition()
        while any(self._started):
            self._send_a_partition()

    def _send_a_partition(self) -> None:
        """The first partition under way leaves all ranks."""
        for rank, started in enumerate(self._started):
            if started:
                with self._of_rank_0(rank):
                    self._orders[rank].sent(started.popleft())
                    self._settle(rank)
        self._deliver()

    @contextmanager
    def _of_rank_0(self, rank: int) -> Iterator[None]:
        """Count the processor time of this block if it is rank 0's."""
        began = time.thread_time()
        yield
        if rank == 0:
            self.cpu_seconds += time.thread_time() - began

    def _settle(self, rank: int) -> None:
        """Act as Core's dispatcher: start what may start, and send what is to be sent."""
        order = self._orders[rank]
        while True:
            task = order.next()
            collect = order.to_collect()
            for message, to in order.outgoing():
                value = to_json(message)
                self._put(rank, Announce(ORDER, value, tuple(to)) if rank == 0 else encode(ToRank0(ORDER, value)))
            for each in collect:
                self._collecting[rank, each.step, each.partition.index] = each
                self._contribute(rank, each)
            if task is not None and self._leaders[rank] == rank:
                self._started[rank].append(task)
            elif task is not None:
                order.sent(task)
                self._contribute(rank, task)
            elif not collect:
                return

    def _contribute(self, rank: int, task: CommTask) -> None:
        """What ``rank`` contributes is there, in the memory of its host."""
        leader = self._leaders[rank]
        key = leader, task.step, task.partition.index
        self._contributed[key] += 1
        if self._contributed[key] == self._leaders.count(leader) and key in self._collecting:
            with self._of_rank_0(leader if leader != rank else -1):  # rank 0's own is counted by who called
                self._orders[leader].collected([self._collecting.pop(key)])
                if leader != rank:
                    self._to_settle.add(leader)

    def _put(self, rank: int, sent: Message | bytes) -> None:
        """``rank`` sends ``sent`` to the control server, which is part of rank 0. Rank 0's own messages are not encoded."""
        with self._of_rank_0(0 if rank > 0 else -1):  # rank 0's own is counted by who called
            self.counts["received"] += rank > 0
            for send in self._roster.received(rank, decode(sent) if isinstance(sent, bytes) else sent, 0.0):
                data = encode(send.message) if any(send.connections) else b""
                for to in send.connections:
                    self.counts["sent"] += to > 0
                    self._wires.append((to, data if to > 0 else send.message))

    def _deliver(self) -> None:
        while self._wires:
            rank, data = self._wires.popleft()
            with self._of_rank_0(rank):
                match decode(data) if isinstance(data, bytes) else data:
                    case FromRank(sender, _, value):
                        self._orders[rank].on_message(sender, json.loads(value))
                    case Announced(_, value):
                        self._orders[rank].on_announced(json.loads(value))
                self._settle(rank)
