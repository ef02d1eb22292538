"""NcclTransport: averages partitions in a device's memory, on a queue of the device that is its own."""

from __future__ import annotations

import threading
from functools import partial

from ....core.device_events import EventWatcher
from ....core.errors import ClosedError, PeerLost, TransportError, error_text
from ....core.interfaces import Buffer, Completion, Transport
from ....core.manifest import ITEMSIZE, Manifest
from ....core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask
from ...backend import TransportContext
from ...collective.failures import DeferredFailure
from ...collective.sequence import SequenceChecker
from ...collective.transport import chunks_of
from .group import NcclGroup

#: How long the device may take to end aborted operations.
_ABORT_SECONDS = 5.0


class NcclTransport(Transport):
    """Averages partitions by NCCL. See ``interfaces.Transport``. A group has no memory of its own here.

    ``task.data`` is memory of :attr:`device`, and is complete there when the task becomes ready. A gradient that is
    reported while its kernel is only queued would block later gradients that are complete already.

    Sums are computed in the gradients' dtype. 16-bit gradients are summed in float32, in a copy. That costs two more passes
    over the device's memory and twice the bytes on the wire, but loses no bits at each hop. The sum is divided afterwards, and
    rounded once. NCCL's own average would first multiply each rank's contribution by a rounded 1/n.

    A task is sent and done when the device has finished it, so no more than the credit is ever queued. The thread
    ``commsched-nccl`` sleeps until then. The result is visible to all work that any stream starts afterwards.
    """

    ordered = True
    verbs = frozenset({ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER})

    def __init__(self, context: TransportContext, group: NcclGroup) -> None:
        self.rank = context.world.rank
        self.world_size = context.world.world_size
        self.device = group.device.name
        self._group = group
        self._verdict = DeferredFailure(context.on_failure, context.when_failed)
        self._launches = SequenceChecker(f"rank {self.rank}", self.channels)
        self._lock = threading.Lock()
        self._unfinished = 0
        self._closed = False
        self._watcher = EventWatcher("commsched-nccl")
        self._copies: list[Buffer] = []  # for 16-bit gradients in float32; of two, the last is in use

    def add_group(self, group: int, manifest: Manifest) -> None:
        self._launches.add_group(group, manifest)

    def start(self, task: CommTask, completion: Completion) -> None:
        """See ``interfaces.Transport``. Queues the work on the device, and waits for nothing.

        Raises:
            OrderMismatch: the task is not the next of the agreed order.
            TransportError: the task's data does not lie on this transport's device.
        """
        self._launches.add(task)
        try:
            self._group.stream.address_of(task.data)
        except ValueError as error:
            raise TransportError(f"rank {self.rank} cannot {self._launches.name(task)}: {error}") from error
        with self._lock:
            if self._closed:
                raise ClosedError("this transport is closed")
            self._unfinished += 1
        try:
            self._run(task)
            event = self._group.stream.record()
        except Exception as error:
            self._fail(task, error)
            return
        self._watcher.call_after(event, partial(self._finish, task, completion), partial(self._fail, task))

    def release(self, group: int) -> None:
        self._launches.release(group)

    def close(self, graceful: bool = True) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._unfinished == 0
        self._verdict.close()
        if graceful and idle:
            self._watcher.close()
            self._group.close()
        else:
            self._group.abort()  # ends the events that the watcher waits for
            self._watcher.close(_ABORT_SECONDS)

    # --- on the device ---

    def _run(self, task: CommTask) -> None:
        dtype, values, stream = task.partition.dtype, task.data, self._group.stream
        if task.verb == ALL_GATHER:
            if self._splits(values, dtype):
                self._group.all_gather(self._chunks(values, dtype))
        elif dtype in ("float16", "bfloat16"):
            wide = self._copy(2 * len(values))
            stream.cast(wide, "float32", values, dtype)
            self._average(task.verb, wide, "float32")
            stream.cast(
                self._same_part(values, dtype, task.verb), dtype, self._same_part(wide, "float32", task.verb), "float32"
            )
        else:
            self._average(task.verb, values, dtype)

    def _average(self, verb: str, values: Buffer, dtype: str) -> None:
        if verb == REDUCE_SCATTER and self._splits(values, dtype):
            self._group.reduce_scatter(self._chunks(values, dtype), dtype)
        else:
            self._group.all_reduce(values, dtype)
        if dtype != "uint8":  # sums of bytes wrap, and are not divided
            self._group.stream.divide(self._same_part(values, dtype, verb), self.world_size, dtype)

    def _copy(self, nbytes: int) -> Buffer:
        """Memory for the operations of one task. Those of the next, which may use it again, come after them on the stream.
        Memory that became too small is kept, since operations may still use it."""
        if not self._copies or len(self._copies[-1]) < nbytes:
            self._copies.append(self._group.device.allocate(1 << (nbytes - 1).bit_length()))
        memory: Buffer = self._copies[-1][:nbytes]
        return memory

    def _same_part(self, values: Buffer, dtype: str, verb: str) -> Buffer:
        """The part of ``values`` that is averaged here."""
        splits = verb == REDUCE_SCATTER and self._splits(values, dtype)
        return self._chunks(values, dtype)[self.rank] if splits else values

    def _splits(self, values: Buffer, dtype: str) -> bool:
        """Whether no rank's chunk of ``values`` is empty. Otherwise the reduce-scatter task averages all of ``values``."""
        return len(values) // ITEMSIZE[dtype] >= self.world_size

    def _chunks(self, values: Buffer, dtype: str) -> list[Buffer]:
        return chunks_of(values, ITEMSIZE[dtype], self.world_size)

    # --- the thread commsched-nccl ---

    def _finish(self, task: CommTask, completion: Completion) -> None:
        broken = self._group.error()
        with self._lock:
            if self._closed:  # the task may have been aborted, and then has no result
                return
            if not broken:
                self._unfinished -= 1
        if broken:
            self._fail(task, broken)
        else:
            completion.on_done(task)

    def _fail(self, task: CommTask, error: Exception | str) -> None:
        """Report a failure of ``task``: an exception on this rank, or NCCL's description of a broken connection."""
        # The task stays unfinished, so that ``close`` aborts it.
        if self._closed:
            return
        what = self._launches.name(task)
        if isinstance(error, str):
            ours: TransportError = PeerLost(
                f"rank {self.rank} lost contact with another rank while it tried to {what}: {error}"
            )
        else:
            ours = TransportError(f"rank {self.rank} failed to {what}: {error_text(error)}")
        self._verdict.report(ours)
