"""The lane of a rank to the shard in its own process: no socket, no copy but that of the result."""

from __future__ import annotations

from ...core.errors import ClosedError, CommschedError
from ...core.manifest import Manifest
from ...core.task import CommTask
from ..contributions import Key
from .frame import Frame, Kind
from .lane import LaneListener
from .service import Service


class OwnLane:
    """Calls the aggregator. See ``Lane``; a push of this rank's may make the average and send it to the other ranks."""

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
        key = Key(task.group, task.step, at.index)

        def reply(result: memoryview) -> None:
            if not self._closed:
                self._listener.on_result(self._rank, Frame(Kind.RESULT, *key, at.dtype, at.start, at.stop, result))

        self._listener.on_sent(self._rank, key)
        try:
            self._service.aggregator.push(self._rank, key, at.dtype, at.start, at.stop, task.data, reply)
        except CommschedError as error:
            self._service.fail(error)  # the other ranks wait for this push

    def leave(self, rank: int) -> None:
        self._service.aggregator.leave(rank)

    def close(self, graceful: bool) -> None:
        self._closed = True
