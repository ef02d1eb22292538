"""CollectiveTransport: averages partitions by the collectives of any backend."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ...core.errors import ClosedError, CommschedError, PeerLost, TransportError, error_text
from ...core.interfaces import Buffer, Completion, Transport
from ...core.manifest import ITEMSIZE, Manifest
from ...core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask
from ..averaging.buffer_pool import BufferPool
from ..averaging.norms import NormSums
from ..averaging.reduce import average
from ..backend import TransportContext
from .channel import MAX_TAGS, CannotBegin, Channel, Done
from .failures import DeferredFailure
from .sequence import SequenceChecker

log = logging.getLogger("commsched")

#: With at most this many ranks, every chunk is sent directly to the rank that sums it. The bits are those of a parameter
#: server. The backends' own all-reduces take longer. MPI's non-blocking all-reduce does not split the data (MPICH, if the
#: number of ranks is no power of two), or sends all of it up and down a tree (Open MPI, in place). gloo's all-reduce takes
#: longer on shaped links. With more ranks the messages become too small.
EXCHANGE_UP_TO = 16

#: The continuation that runs when an operation has succeeded.
_Then = Callable[[], None]


class CollectiveTransport(Transport):
    """See ``interfaces.Transport``. It is ordered, and checks the sequence of each of its ``channels``. A group has no
    memory of its own here.

    Every rank receives all contributions to its chunk from the other ranks, sums them in rank order (16-bit floats in 32 bits),
    and sends the average to all other ranks. It sends as many bytes as a ring all-reduce. Two ranks need half the messages for
    these bytes: each sends the other its whole contribution, and both sum alike. With more than ``exchange_up_to``
    ranks, the channel's own all-reduce sums the dtypes that it supports, and this transport divides the sum. Reduce-scatter
    and all-gather tasks use the exchange with any number of ranks.

    Args:
        context: the transport's arguments. An operation that fails is reported to ``on_failure``, from any thread, unless the
            job's own failure is known first.
        channels: at least one channel, of the ranks of ``context.world``. They are closed with the transport.
    """

    ordered = True
    verbs = frozenset({ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER})

    def __init__(self, context: TransportContext, channels: Sequence[Channel]) -> None:
        self.rank = context.world.rank
        self.world_size = context.world.world_size
        self.channels = len(channels)
        self.exchange_up_to = EXCHANGE_UP_TO
        self._channels = channels
        self._divisor = context.contributors.divisor
        self._who = f"rank {context.job_rank}"
        self._verdict = DeferredFailure(context.on_failure, context.when_failed)
        self._launches = SequenceChecker(self._who, len(channels))
        self._buffers = BufferPool()
        self._collective = context.settings.collective
        self._sums: dict[int, NormSums] = {}  # by group of norms
        self._measured: dict[int, tuple[NormSums, ...]] = {}  # by the group that is measured
        self._lock = threading.Lock()
        self._under_way = 0
        self._closed = False

    # --- interfaces.Transport ---

    def add_group(self, group: int, manifest: Manifest) -> None:
        self._launches.add_group(group, manifest)
        if (norms := manifest.norms) is not None:
            sums = self._sums[group] = NormSums(self._launches.manifest(norms.group), manifest)
            self._measured[norms.group] = (*self._measured.get(norms.group, ()), sums)

    def norm_rows(self, manifest: Manifest) -> int:
        """See ``interfaces.Transport``. Each rank makes the averages of its chunks, if it may split all-reduces for that. More
        ranks than ``exchange_up_to`` would make the messages of both halves too small, so there only the user splits."""
        splits = self._collective == "rsag" or (self._collective == "auto" and self.world_size <= EXCHANGE_UP_TO)
        return self.world_size if splits else 0

    def start(self, task: CommTask, completion: Completion) -> None:
        """See ``interfaces.Transport``.

        Raises:
            OrderMismatch: the task is not the next of its channel; names its tensor and the tensor of the last task.
            ClosedError: the transport is closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("this transport is closed")
            self._under_way += 1
        self._launches.add(task)
        then = partial(self._complete, task, completion)
        self._attempt(task, partial(self._begin, task, then))

    def release(self, group: int) -> None:
        self._launches.release(group)
        self._sums.pop(group, None)
        self._measured.pop(group, None)

    def close(self, graceful: bool = True) -> None:
        """See ``interfaces.Transport``. Outstanding operations give no result, whether ``graceful`` or not."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._under_way == 0
        self._verdict.close()
        for channel in self._channels:
            channel.close(graceful and idle)

    # --- one task ---

    def _begin(self, task: CommTask, then: _Then) -> None:
        channel = self._channels[task.channel]
        dtype = task.partition.dtype
        if task.verb == ALL_REDUCE and dtype in channel.native and self.world_size > self.exchange_up_to:
            self._operate(partial(channel.all_reduce, task.data, dtype), self._next(task, partial(self._divide, task, then)))
        elif task.verb == ALL_REDUCE and self.world_size == 2:
            self._swap(task, then)
        elif task.verb == ALL_REDUCE:
            self._reduce_scatter(task, partial(self._all_gather, task, then))
        elif task.verb == REDUCE_SCATTER:
            self._reduce_scatter(task, partial(self._measure, task, then))
        else:
            if task.group in self._sums:
                self._write_row(task)
            self._all_gather(task, then)

    def _divide(self, task: CommTask, then: _Then) -> None:
        dtype = task.partition.dtype
        if dtype != "uint8":  # sums of bytes serve to move bytes: see ``reduce.average``
            values = np.frombuffer(task.data, dtype)
            with np.errstate(all="ignore"):
                np.divide(values, values.dtype.type(self._divisor), out=values)
        then()

    def _swap(self, task: CommTask, then: _Then) -> None:
        """Write the average of both ranks' whole contributions into the task's data."""
        contributions = [task.data, task.data]
        contributions[1 - self.rank] = self._buffers.take(len(task.data))
        self._exchange(task, 0, [task.data] * 2, contributions, partial(self._average, task, contributions, then))

    def _reduce_scatter(self, task: CommTask, then: _Then) -> None:
        """Write the average of this rank's chunk into the task's data."""
        chunks = self._chunks(task)
        own = chunks[self.rank]
        contributions = [
            own if peer == self.rank or len(own) == 0 else self._buffers.take(len(own)) for peer in range(self.world_size)
        ]
        self._exchange(task, 0, chunks, contributions, partial(self._average, task, contributions, then))

    def _average(self, task: CommTask, contributions: list[memoryview], then: _Then) -> None:
        own = contributions[self.rank]
        if len(own) > 0:
            # Only the first two contributions may hold the average: see ``average``.
            out = own if self.rank < 2 else contributions[0]
            average(contributions, task.partition.dtype, out, self._divisor)
            if out is not own:
                np.copyto(np.frombuffer(own, np.uint8), np.frombuffer(out, np.uint8))
        then()

    def _measure(self, task: CommTask, then: _Then) -> None:
        """Add the average of this rank's chunk to the norms of the group, if there are any."""
        for sums in self._measured.get(task.group, ()):
            itemsize, at = ITEMSIZE[task.partition.dtype], task.partition
            before = len(task.data) // itemsize * self.rank // self.world_size * itemsize
            if len(own := self._chunks(task)[self.rank]):
                sums.add(task.step, at.dtype, at.start + before, own)
        then()

    def _write_row(self, task: CommTask) -> None:
        """Write this rank's row of norms into its chunk. Every reduce-scatter of the step is done on this rank."""
        row = self._sums[task.group].take_row(task.step)
        np.copyto(np.frombuffer(self._chunks(task)[self.rank], row.dtype), row)

    def _all_gather(self, task: CommTask, then: _Then) -> None:
        """Send the average of this rank's chunk to all ranks, and receive the averages of the other chunks."""
        chunks = self._chunks(task)
        self._exchange(task, 1, [chunks[self.rank]] * self.world_size, chunks, then)

    def _exchange(
        self, task: CommTask, phase: int, outgoing: Sequence[memoryview], incoming: Sequence[memoryview], then: _Then
    ) -> None:
        """Send ``outgoing[r]`` to rank ``r``, and receive its message into ``incoming[r]``, for all other ranks ``r``."""
        sends = [(peer, data) for peer, data in self._peers(outgoing) if len(data)]
        receives = [(peer, data) for peer, data in self._peers(incoming) if len(data)]
        if not sends and not receives:
            return then()
        tag = (2 * task.sequence + phase) % MAX_TAGS
        self._operate(partial(self._channels[task.channel].exchange, tag, sends, receives), self._next(task, then))

    def _peers(self, data: Sequence[memoryview]) -> list[tuple[int, memoryview]]:
        """Pair each other rank with its data, in an order that spreads the load: not all ranks send to rank 0 first."""
        after = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        return [(peer, data[peer]) for peer in after]

    def _chunks(self, task: CommTask) -> list[memoryview]:
        return chunks_of(task.data, ITEMSIZE[task.partition.dtype], self.world_size)

    # --- the end of an operation ---

    def _operate(self, operation: Callable[[Done], None], done: Done) -> None:
        try:
            operation(done)
        except Exception as error:
            done(CannotBegin(error_text(error)))

    def _next(self, task: CommTask, then: _Then) -> Done:
        """Return a ``Done`` that continues with ``then``, which runs in the backend's thread and may raise."""

        def done(error: BaseException | None) -> None:
            if isinstance(error, CannotBegin):
                self._fail(TransportError(f"{self._who} failed to {self._launches.name(task)}: {error}"))
            elif error is not None:
                what = self._launches.name(task)
                self._fail(PeerLost(f"{self._who} lost contact with another rank while it tried to {what}: {error}"))
            elif not self._closed:
                self._attempt(task, then)

        return done

    def _attempt(self, task: CommTask, action: _Then) -> None:
        try:
            action()
        except Exception as error:
            what = self._launches.name(task)
            log.exception("%s failed to %s", self._who, what)
            self._fail(TransportError(f"{self._who} failed to {what}: {error_text(error)}"))

    def _complete(self, task: CommTask, completion: Completion) -> None:
        with self._lock:
            self._under_way -= 1
        completion.on_done(task)

    def _fail(self, error: CommschedError) -> None:
        # The task stays outstanding, so that ``close`` ends the backend's remaining operations of it.
        if not self._closed:
            self._verdict.report(error)


def chunks_of(data: Buffer, itemsize: int, world_size: int) -> list[Any]:
    """Split ``data``, which holds ``numel`` elements of ``itemsize`` bytes, into one chunk per rank.

    The chunk of rank ``r`` holds elements ``numel * r // world_size`` to ``numel * (r + 1) // world_size``. With fewer elements
    than ranks, some chunks are empty.
    """
    numel = len(data) // itemsize
    borders = [numel * rank // world_size * itemsize for rank in range(world_size + 1)]
    return [data[start:stop] for start, stop in pairwise(borders)]
