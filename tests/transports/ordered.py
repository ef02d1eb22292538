"""Collectives between ranks that are threads of one process.

They have the property that makes real collectives dangerous: tasks carry no identity. The tasks that the ranks launch at the
same position of a channel are averaged, even if they are different tasks. If their sizes are equal, the result is wrong
numbers without any error.
"""

from __future__ import annotations

import threading

import numpy as np

from commsched.core.errors import ClosedError, TransportError
from commsched.core.interfaces import Completion, OnFailure, Transport
from commsched.core.manifest import ITEMSIZE
from commsched.core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask
from commsched.transports.averaging.reduce import average
from commsched.transports.collective.transport import chunks_of


class OrderedWorld:
    """The shared state of all ranks: the tasks launched at each position of each channel."""

    def __init__(self, world_size: int, divisor: int | None = None) -> None:
        self.world_size = world_size
        self._divisor = divisor  # of averages, if the ranks of this world stand for others
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
        _carry_out(tasks, self._divisor)
        for task, completion in launched.values():
            completion.on_done(task)


class OrderedTransport(Transport):
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

    def start(self, task: CommTask, completion: Completion) -> None:
        if self._closed:
            raise ClosedError("this transport is closed")
        place = task.channel, self._places[task.channel]
        self._places[task.channel] += 1
        self._world.launch(self.rank, place, task, completion)

    def close(self, graceful: bool = True) -> None:
        self._closed = True


def _carry_out(tasks: list[CommTask], divisor: int | None) -> None:
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
            average(chunks, dtype, result.data, divisor)
        for receiver in [chunks[rank]] if tasks[0].verb == REDUCE_SCATTER else chunks:
            receiver[:] = result.data
