"""Collectives for tests, between ranks that are threads of one process, and a control channel for them.

The collectives have the property that makes real collectives dangerous: tasks carry no identity. The tasks that the ranks
launch at the same position of a channel are averaged, even if they are different tasks. If their sizes are equal, the result
is wrong numbers without any error.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ..control.roster import first_common_steps
from ..core.config import SchedulerConfig
from ..core.core import Core
from ..core.errors import ClosedError, TransportError
from ..core.interfaces import Completion, OnFailure
from ..core.manifest import ITEMSIZE, Manifest
from ..core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask
from ..transports.averaging.reduce import average
from ..transports.collective.chunks import chunks_of


class OrderedWorld:
    """The shared state of all ranks: the tasks launched at each position of each channel."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._lock = threading.Lock()
        self._places: dict[
            tuple[int, int], dict[int, tuple[CommTask, Completion]]
        ] = {}  # (channel, position) -> rank -> the task that it launched

    def transport(self, rank: int, on_failure: OnFailure) -> OrderedTransport:
        return OrderedTransport(self, rank, on_failure)

    def launch(self, rank: int, place: tuple[int, int], task: CommTask, completion: Completion) -> None:
        """Launch ``task`` at ``place``. The rank that launches last averages the tasks of all ranks and completes them."""
        with self._lock:
            launched = self._places.setdefault(place, {})
            launched[rank] = task, completion
            if len(launched) < self.world_size:
                return
            del self._places[place]
        tasks = [launched[rank][0] for rank in range(self.world_size)]
        if len({task.nbytes for task in tasks}) > 1:
            raise TransportError(f"sizes differ at {place}: {tasks}")
        _carry_out(tasks)
        for task, completion in launched.values():
            completion.on_done(task)


class OrderedTransport:
    """One rank of an :class:`OrderedWorld`."""

    verbs = frozenset({ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER})
    ordered = True
    channels = 2

    def __init__(self, world: OrderedWorld, rank: int, on_failure: OnFailure) -> None:
        self.rank = rank
        self.world_size = world.world_size
        self._world = world
        self._places = [0] * self.channels
        self._closed = False

    def add_group(self, group: int, manifest: Manifest) -> None:
        pass

    def start(self, task: CommTask, completion: Completion) -> None:
        if self._closed:
            raise ClosedError("this transport is closed")
        place = task.channel, self._places[task.channel]
        self._places[task.channel] += 1
        self._world.launch(self.rank, place, task, completion)

    def release(self, group: int) -> None:
        pass

    def leave(self, rank: int) -> None:
        pass

    def close(self, graceful: bool = True) -> None:
        self._closed = True


def _carry_out(tasks: list[CommTask]) -> None:
    """Run the collective on all tasks. The verb of rank 0's task decides which collective."""
    dtype = tasks[0].partition.dtype
    by_rank = [chunks_of(task.data, ITEMSIZE[dtype], len(tasks)) for task in tasks]
    for rank, chunks in enumerate(zip(*by_rank)):
        if len(chunks[rank]) == 0:
            continue
        if tasks[0].verb == ALL_GATHER:
            result = np.frombuffer(chunks[rank], np.uint8).copy()
        else:
            result = np.empty(len(chunks[rank]), np.uint8)
            average(chunks, dtype, result.data)
        for receiver in [chunks[rank]] if tasks[0].verb == REDUCE_SCATTER else chunks:
            receiver[:] = result.data


class Switchboard:
    """A control channel between Cores of one process. It has only the calls that they need to agree on an order.

    ``tamper(rank, message)`` may change the message that rank 0 announces to ``rank``.
    """

    def __init__(self, tamper: Callable[[int, Any], Any] = lambda rank, message: message) -> None:
        self._tamper = tamper
        self._lock = threading.Lock()
        self._proposing = threading.Lock()
        self._cores: dict[int, Core] = {}
        self._early: list[tuple[int, Callable[[Core], None]]] = []  # messages for Cores that have not joined yet

    def join(self, rank: int, core: Core) -> None:
        with self._lock:
            self._cores[rank] = core
            early = [message for to, message in self._early if to == rank]
            self._early = [(to, message) for to, message in self._early if to != rank]
            for deliver in early:
                deliver(core)

    def messenger(self, rank: int, world_size: int) -> SwitchboardMessenger:
        return SwitchboardMessenger(self, rank, world_size)

    def deliver(self, to: int, message: Callable[[Core], None]) -> None:
        with self._lock:
            core = self._cores.get(to)
            if core is None:
                self._early.append((to, message))
                return
        message(core)

    def agree(self, config: SchedulerConfig | None) -> None:
        """Agree on the step from which all ranks use ``config``. Proposals are handled one after another."""
        with self._proposing:
            steps = first_common_steps([core.hold_steps() for core in self._cores.values()])
            for core in self._cores.values():
                core.switch_at(config, steps)

    def tampered(self, rank: int, value: Any) -> Any:
        return self._tamper(rank, json.loads(json.dumps(value)))  # JSON, as it would arrive over the network


class SwitchboardMessenger:
    """The connection of one rank to the switchboard."""

    def __init__(self, board: Switchboard, rank: int, world_size: int) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size

    def tell(self, value: Any) -> None:
        message = json.loads(json.dumps(value))
        self._board.deliver(0, lambda core: core.on_told(self._rank, message))

    def announce(self, value: Any) -> None:
        for rank in range(1, self._world_size):
            message = self._board.tampered(rank, value)
            self._board.deliver(rank, lambda core, message=message: core.on_announced(message))  # type: ignore[misc]

    def propose(self, config: dict[str, Any]) -> None:
        self._board.agree(SchedulerConfig(**config) if config else None)
