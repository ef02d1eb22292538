"""Lanes: a worker's connections to shards. The shard in the worker's own process needs no socket."""

from __future__ import annotations

from typing import Protocol

from ....core.errors import ClosedError, CommschedError
from ....core.manifest import Manifest
from ....core.task import CommTask
from ...averaging.contributions import PartitionKey
from .frame import Frame, FrameKind
from .service import Service


class LaneListener(Protocol):
    """Callbacks of a lane. They are called from the lane's own threads, or inside ``push``, without a lock held.

    For one key, ``on_sent`` returns before ``on_result`` is called. ``server`` is the index that the lane was created with.
    """

    def on_sent(self, server: int, key: PartitionKey) -> None:
        """The push of ``key`` has left this rank."""
        ...

    def destination(self, server: int, frame: Frame) -> memoryview:
        """Return the memory for the average that ``frame`` announces.

        Raises:
            ProtocolError: no task of this rank waits for it.
        """
        ...

    def on_result(self, server: int, frame: Frame) -> None:
        """The average of ``frame.key`` has come. Its payload is the ``destination``, or read-only memory to copy from.

        Raises:
            ProtocolError: no task of this rank waits for it.
        """
        ...

    def describe(self, frame: Frame) -> str:
        """Name the average that ``frame`` announces in a message: its partition, step and tensor."""
        ...

    def on_end(self, server: int) -> None:
        """The server ended in good order. Nothing more comes."""
        ...

    def on_broken(self, server: int, error: CommschedError) -> None:
        """The lane failed, or the server reported a failure. Nothing more comes."""
        ...


class Lane(Protocol):
    """Carries pushes to one server and its results back."""

    def add_group(self, group: int, manifest: Manifest) -> None:
        """Announce a group before its first push."""
        ...

    def push(self, task: CommTask) -> None:
        """Send ``task.data``, which must not change until the result has come. Never waits for other ranks.

        Raises:
            PeerLost: the server is gone.
            CommschedError: the lane failed for another reason, or is closed.
        """
        ...

    def leave(self, rank: int) -> None:
        """Notify the server that ``rank`` will push nothing more, so that no rank waits for it."""
        ...

    def close(self, graceful: bool) -> None:
        """Say goodbye if ``graceful``, and end. The listener is not called afterwards. Idempotent."""
        ...


class OwnLane:
    """Calls the aggregator of this process. See ``Lane``. A push may compute the average and queue it to the other ranks."""

    def __init__(self, rank: int, service: Service, listener: LaneListener) -> None:
        self._rank = rank
        self._service = service
        self._listener = listener
        self._closed = False

    def add_group(self, group: int, manifest: Manifest) -> None:
        self._service.aggregator.add_group(self._rank, group, manifest)

    def push(self, task: CommTask) -> None:
        if self._closed:
            raise ClosedError("this lane is closed")
        at = task.partition
        key = PartitionKey(task.group, task.step, at.index)

        def reply(result: memoryview) -> None:
            if not self._closed:
                self._listener.on_result(self._rank, Frame(FrameKind.RESULT, *key, at.dtype, at.start, at.stop, result))

        self._listener.on_sent(self._rank, key)
        try:
            self._service.aggregator.push(self._rank, key, at.dtype, at.start, at.stop, task.data, reply)
        except CommschedError as error:
            self._service.fail(error)  # the other ranks wait for this push

    def leave(self, rank: int) -> None:
        self._service.aggregator.leave(rank)

    def close(self, graceful: bool) -> None:
        self._closed = True
