"""Ranks that are threads of one process: the reference implementation, and the world that tests use."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ..core.errors import ClosedError, CommschedError, ConfigError
from ..core.manifest import Manifest
from ..core.ports import Completion, OnFailure
from ..core.task import ALL_REDUCE, CommTask
from .aggregator import Aggregator
from .context import TransportContext
from .contributions import Key


class LocalWorld:
    """Where the ranks of one process meet. A failure, whoever caused it, is told to every rank that has not left. For
    ``members`` and ``divisor`` see ``TransportContext``."""

    def __init__(self, world_size: int, members: Sequence[int] | None = None, divisor: int | None = None) -> None:
        self.world_size = world_size
        self.aggregator = Aggregator(world_size, self.fail, members, divisor)
        self._lock = threading.Lock()
        self._listeners: dict[int, OnFailure] = {}

    def transport(self, rank: int, on_failure: OnFailure) -> LocalTransport:
        """The transport of ``rank``; at most one each."""
        with self._lock:
            if rank in self._listeners or not 0 <= rank < self.world_size:
                raise ConfigError(f"rank {rank} is taken, or not below the world size of {self.world_size}")
            self._listeners[rank] = on_failure
        return LocalTransport(self, rank)

    def fail(self, error: CommschedError) -> None:
        """Tell every rank that has neither left nor closed. Any thread."""
        with self._lock:
            listeners = list(self._listeners.values())
        for on_failure in listeners:
            on_failure(error)

    def leave(self, rank: int) -> None:
        """``rank`` will send nothing more. Idempotent."""
        self._forget(rank)
        self.aggregator.leave(rank)

    def abandon(self, rank: int) -> None:
        """``rank`` is gone, and its buffers with it."""
        self._forget(rank)
        self.aggregator.abandon(rank)

    def _forget(self, rank: int) -> None:
        with self._lock:
            self._listeners.pop(rank, None)


class LocalTransport:
    """One rank of a :class:`LocalWorld`. Contributions are read where they lie: ``task.data`` is the transport's until done."""

    verbs = frozenset({ALL_REDUCE})
    ordered = False
    channels = 1

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.rank = rank
        self.world_size = world.world_size
        self._world = world
        self._closed = False

    def add_group(self, group: int, manifest: Manifest) -> None:
        """See ``ports.Transport``.

        Raises:
            ManifestMismatch: another rank added other tensors.
        """
        self._world.aggregator.add_group(self.rank, group, manifest)

    def start(self, task: CommTask, completion: Completion) -> None:
        """See ``ports.Transport``. The rank that starts last makes the average and completes the task of every rank."""
        if self._closed:
            raise ClosedError("this transport is closed")

        def reply(result: memoryview) -> None:
            if self._closed:
                return
            np.copyto(np.frombuffer(task.data, np.uint8), np.frombuffer(result, np.uint8))
            completion.on_done(task)

        completion.on_sent(task)
        at = task.partition
        key = Key(task.group, task.step, at.index)
        try:
            self._world.aggregator.push(self.rank, key, at.dtype, at.start, at.stop, task.data, reply)
        except CommschedError as error:
            self._world.fail(error)

    def release(self, group: int) -> None:
        """Nothing to do: a group has no memory of its own here."""

    def leave(self, rank: int) -> None:
        self._world.leave(rank)

    def close(self, graceful: bool = True) -> None:
        """A rank that closes has left: who still needs it gets PeerLost. Idempotent."""
        if not self._closed:
            self._closed = True
            self._world.abandon(self.rank)


def open_transport(context: TransportContext) -> LocalTransport:
    """``transport="local"`` is for ranks that are threads, which ``commsched.local.local_sessions`` opens.

    Raises:
        ConfigError: always, as ranks that are processes cannot meet in memory.
    """
    raise ConfigError("transport='local' joins threads of one process; for processes use transport='ps'")
