"""Several AgreedOrders, and a network between them that delivers when it is told to."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from commsched.core.order.agreed import AgreedOrder
from commsched.core.order.messages import LaunchKey
from commsched.core.plan import Partition
from commsched.core.policies import make_policy
from commsched.core.task import ALL_REDUCE, CommTask

NBYTES = 100

#: How a task was launched.
AGREED, STATIC = "agreed", "static"


def make_task(
    step: int, partition: int, *, group: int = 0, start: int | None = None, nbytes: int = NBYTES, verb: str = ALL_REDUCE
) -> CommTask:
    first = nbytes * partition if start is None else start
    return CommTask(group, step, Partition(partition, "float32", first, first + nbytes, (partition,)), memoryview(b""), verb)


class Ranks:
    """``started[rank]`` are tasks in order of start; messages wait in ``wires[sender, receiver]``, and
    contributions to the leader of a host in ``wires[sender, -1]``."""

    def __init__(
        self,
        size: int,
        *,
        credit_bytes: int = NBYTES,
        freeze: bool = False,
        policy: str = "priority",
        channels: int = 2,
        tasks: int = 10,
        per_host: int = 1,
    ) -> None:
        """``tasks``: how many a step of group 0 has; group 1 has one fewer. ``per_host``: of so many
        ranks the first launches for all."""
        self.size = size
        self.leaders = [rank - rank % per_host for rank in range(size)]
        self.orders = [
            AgreedOrder(
                rank, self.leaders, make_policy(policy), credit_bytes, channels=channels, freeze=freeze, describe=describe
            )
            for rank in range(size)
        ]
        self.contributed: dict[int, dict[LaunchKey, list[int]]] = {leader: {} for leader in self.leaders}
        self.collecting: dict[tuple[int, LaunchKey], CommTask] = {}
        self.kinds: Counter[tuple[int, int, str]] = Counter()  # messages by sender, receiver and kind
        for order in self.orders:
            for group in range(2):
                order.add_group(group, NBYTES * (tasks - group), may_freeze=True)
        self.started: list[list[CommTask]] = [[] for _ in range(size)]
        self.how: list[list[str]] = [[] for _ in range(size)]
        self.wires: dict[tuple[int, int], deque[Any]] = {}
        self.tamper: Callable[[int, Any], Any] = lambda to, message: message
        self.messages = 0

    def add(self, rank: int, task: CommTask) -> None:
        self.orders[rank].add(task)
        self.settle(rank)

    def is_led(self, rank: int) -> bool:
        return self.leaders[rank] != rank

    def contribute(self, rank: int, key: LaunchKey) -> None:
        """A contribution of ``rank`` is there, on the leader of its host."""
        leader = self.leaders[rank]
        ranks = self.contributed[leader].setdefault(key, [])
        assert rank not in ranks, f"rank {rank} contributed {key} twice"
        ranks.append(rank)
        task = self.collecting.get((leader, key))
        if task is not None and len(ranks) == self.leaders.count(leader):
            self.orders[leader].collected([task])
            self.settle(leader)

    def sent(self, rank: int, task: CommTask) -> None:
        if self.is_led(rank):
            return  # its credit came back when its contribution was there
        self.orders[rank].sent(task)
        self.settle(rank)

    def settle(self, rank: int) -> None:
        """Act as Core's dispatcher: start what may start, and send what is to be sent."""
        order = self.orders[rank]
        while True:
            had_work = order.has_work()
            task, collect, outgoing = order.next(), order.to_collect(), order.outgoing()
            assert had_work or (task is None and not outgoing and not collect), "the dispatcher would sleep"
            for message, among in outgoing:
                for to in (among or range(self.size)) if rank == 0 else [0]:
                    if to != rank:
                        self.wires.setdefault((rank, to), deque()).append(json.dumps(message))
                        self.kinds[rank, to, message["kind"]] += 1
            for each in collect:
                self.collecting[rank, LaunchKey.of(each)] = each
                self.contribute(rank, LaunchKey.of(each))
            if task is None and collect:
                continue
            if task is None:
                return
            if self.is_led(rank):
                self.wires.setdefault((rank, -1), deque()).append(LaunchKey.of(task))
                order.sent(task)
            self.started[rank].append(task)
            static = order._frozen is not None and order._frozen.covers(LaunchKey.of(task))
            self.how[rank].append(STATIC if static else AGREED)

    def deliver(self, wire: tuple[int, int]) -> None:
        """The oldest message of that wire."""
        self.messages += 1
        sender, to = wire
        data = self.wires[wire].popleft()
        if to < 0:
            self.contribute(sender, data)
            return
        message = json.loads(data)
        if to == 0:
            self.orders[0].on_message(sender, message)
        else:
            self.orders[to].on_announced(self.tamper(to, message))
        self.settle(to)

    @property
    def busy(self) -> list[tuple[int, int]]:
        return sorted(wire for wire, messages in self.wires.items() if messages)

    def deliver_all(self) -> None:
        while self.busy:
            self.deliver(self.busy[0])

    def launched(self, rank: int, how: str) -> list[LaunchKey]:
        return [LaunchKey.of(task) for task, each in zip(self.started[rank], self.how[rank]) if each == how]

    def on_channel(self, rank: int, channel: int) -> list[CommTask]:
        return [task for task in self.started[rank] if task.channel == channel]


def describe(key: LaunchKey) -> str:
    return f"tensor 'layer{key.partition}' (step {key.step})"
