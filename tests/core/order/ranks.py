"""Several AgreedOrders, and a network between them that delivers when it is told to."""

from __future__ import annotations

import json
from collections import deque
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
    """``started[rank]`` are tasks in order of start; messages wait in ``wires[sender, receiver]``."""

    def __init__(
        self,
        size: int,
        *,
        credit_bytes: int = NBYTES,
        freeze: bool = False,
        policy: str = "priority",
        channels: int = 2,
        tasks: int = 10,
    ) -> None:
        """``tasks``: how many a step of group 0 has; group 1 has one fewer."""
        self.size = size
        self.orders = [
            AgreedOrder(rank, size, make_policy(policy), credit_bytes, channels=channels, freeze=freeze, describe=describe)
            for rank in range(size)
        ]
        for order in self.orders:
            for group in range(2):
                order.add_group(group, NBYTES * (tasks - group))
        self.started: list[list[CommTask]] = [[] for _ in range(size)]
        self.how: list[list[str]] = [[] for _ in range(size)]
        self.wires: dict[tuple[int, int], deque[str]] = {}
        self.tamper: Callable[[int, Any], Any] = lambda to, message: message
        self.messages = 0

    def add(self, rank: int, task: CommTask) -> None:
        self.orders[rank].add(task)
        self.settle(rank)

    def sent(self, rank: int, task: CommTask) -> None:
        self.orders[rank].sent(task)
        self.settle(rank)

    def settle(self, rank: int) -> None:
        """Act as Core's dispatcher: start what may start, and send what is to be sent."""
        order = self.orders[rank]
        while True:
            had_work = order.has_work()
            task, outgoing = order.next(), order.outgoing()
            assert had_work or (task is None and not outgoing), "the dispatcher would sleep"
            for message in outgoing:
                for to in range(1, self.size) if rank == 0 else [0]:
                    self.wires.setdefault((rank, to), deque()).append(json.dumps(message))
            if task is None:
                return
            self.started[rank].append(task)
            static = order._frozen is not None and order._frozen.covers(LaunchKey.of(task))
            self.how[rank].append(STATIC if static else AGREED)

    def deliver(self, wire: tuple[int, int]) -> None:
        """The oldest message of that wire."""
        self.messages += 1
        sender, to = wire
        message = json.loads(self.wires[wire].popleft())
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
