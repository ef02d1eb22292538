"""A transport for ranks that are threads of one process: the reference implementation, which tests use."""

from __future__ import annotations

import threading

import numpy as np

from ...core.errors import ClosedError, CommschedError, ConfigError
from ...core.interfaces import Completion, OnFailure, Transport
from ...core.manifest import Manifest
from ...core.task import CommTask
from ..averaging.aggregator import Aggregator
from ..averaging.contributions import PartitionKey
from ..backend import Backend, Contributors, TransportContext


class LocalWorld:
    """The world of ranks in one process. A failure is reported to every rank that has not left, whichever rank caused it.
    ``contributors`` are the ranks of a job, unless they are given.
    """

    def __init__(self, world_size: int, contributors: Contributors | None = None) -> None:
        self.world_size = world_size
        self.aggregator = Aggregator(contributors or Contributors.all_ranks(world_size), self.fail)
        self._lock = threading.Lock()
        self._listeners: dict[int, OnFailure] = {}

    def transport(self, rank: int, on_failure: OnFailure) -> LocalTransport:
        """Return the transport of ``rank``. Each rank has at most one.

        Raises:
            ConfigError: the rank has a transport already, or is not below the world size.
        """
        with self._lock:
            if rank in self._listeners or not 0 <= rank < self.world_size:
                raise ConfigError(f"rank {rank} is taken, or not below the world size of {self.world_size}")
            self._listeners[rank] = on_failure
        return LocalTransport(self, rank)

    def fail(self, error: CommschedError) -> None:
        """Report ``error`` to every rank that has neither left nor closed. Thread-safe."""
        with self._lock:
            listeners = list(self._listeners.values())
        for on_failure in listeners:
            on_failure(error)

    def leave(self, rank: int) -> None:
        """``rank`` will send nothing more. Idempotent."""
        self._forget(rank)
        self.aggregator.leave(rank)

    def abandon(self, rank: int) -> None:
        """``rank`` and its buffers are gone."""
        self._forget(rank)
        self.aggregator.abandon(rank)

    def _forget(self, rank: int) -> None:
        with self._lock:
            self._listeners.pop(rank, None)


class LocalTransport(Transport):
    """One rank of a :class:`LocalWorld`. ``task.data`` is not copied, and is the transport's until the task is done."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.rank = rank
        self.world_size = world.world_size
        self._world = world
        self._closed = False

    def add_group(self, group: int, manifest: Manifest) -> None:
        self._world.aggregator.add_group(self.rank, group, manifest)

    def release(self, group: int) -> None:
        self._world.aggregator.release(self.rank, (group,))

    def norm_rows(self, manifest: Manifest) -> int:
        return 1  # one aggregator makes all averages

    def start(self, task: CommTask, completion: Completion) -> None:
        """See ``interfaces.Transport``. The rank that starts last computes the average and completes the task of every rank."""
        if self._closed:
            raise ClosedError("this transport is closed")

        def reply(result: memoryview) -> None:
            if self._closed:
                return
            np.copyto(np.frombuffer(task.data, np.uint8), np.frombuffer(result, np.uint8))
            completion.on_done(task)

        completion.on_sent(task)
        at = task.partition
        key = PartitionKey(task.group, task.step, at.index)
        try:
            self._world.aggregator.push(self.rank, key, at.dtype, at.start, at.stop, task.data, reply)
        except CommschedError as error:
            self._world.fail(error)

    def leave(self, rank: int) -> None:
        self._world.leave(rank)

    def close(self, graceful: bool = True) -> None:
        """See ``interfaces.Transport``. A rank that closes has left: ranks that still need it fail with PeerLost."""
        if not self._closed:
            self._closed = True
            self._world.abandon(self.rank)


def open_transport(context: TransportContext) -> LocalTransport:
    """Refuse: ``transport="local"`` is for ranks that are threads, which ``commsched.session.local.local_sessions`` opens.

    Raises:
        ConfigError: always, because ranks that are processes do not share memory.
    """
    raise ConfigError("transport='local' joins threads of one process; for processes use transport='ps'")


BACKEND = Backend(open_transport)
