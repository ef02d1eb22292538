"""NcclTransport: averages partitions in a device's memory, on a queue of the device that is its own."""

from __future__ import annotations

import threading
from functools import partial

import torch

from ....core.device_events import EventWatcher
from ....core.errors import ClosedError, PeerLost, TransportError
from ....core.interfaces import Completion, Transport
from ....core.manifest import Manifest
from ....core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask
from ...backend import TransportContext
from ...collective.failures import DeferredFailure
from ...collective.sequence import SequenceChecker
from .group import NcclGroup

#: How long the device may take to end aborted operations.
_ABORT_SECONDS = 5.0


class NcclTransport(Transport):
    """Averages partitions by NCCL. See ``interfaces.Transport``. A group has no memory of its own here, and messages may
    still name tensors of a released one.

    ``task.data`` is a tensor of uint8 on :attr:`device`, and is complete there when the task becomes ready. A gradient that is
    reported while its kernel is only queued would block later gradients that are complete already.

    Sums are computed in the gradients' dtype. 16-bit gradients are summed in float32, in a temporary copy. That costs two more
    passes over the device's memory and twice the bytes on the wire, but loses no bits at each hop. The sum is divided
    afterwards, and rounded once. NCCL's own average would first multiply each rank's contribution by a rounded 1/n.

    A task is sent and done when the device has finished it, so no more than the credit is ever queued. The thread
    ``commsched-nccl`` sleeps until then. The result is visible to all work that any stream starts afterwards.
    """

    ordered = True
    verbs = frozenset({ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER})

    def __init__(self, context: TransportContext, group: NcclGroup) -> None:
        self.rank = context.world.rank
        self.world_size = context.world.world_size
        self.device = str(group.device)
        self._group = group
        self._verdict = DeferredFailure(context.on_failure, context.when_failed)
        self._launches = SequenceChecker(f"rank {self.rank}", self.channels)
        self._lock = threading.Lock()
        self._unfinished = 0
        self._closed = False
        self._watcher = EventWatcher("commsched-nccl")

    def add_group(self, group: int, manifest: Manifest) -> None:
        self._launches.add_group(group, manifest)

    def start(self, task: CommTask, completion: Completion) -> None:
        """See ``interfaces.Transport``. Queues the work on the device, and waits for nothing.

        Raises:
            OrderMismatch: the task is not the next of the agreed order.
            TransportError: the task's data does not lie on this transport's device.
        """
        self._launches.add(task)
        if not isinstance(task.data, torch.Tensor) or task.data.device != self._group.device:
            where = task.data.device if isinstance(task.data, torch.Tensor) else "the host"
            raise TransportError(
                f"rank {self.rank} cannot {self._launches.name(task)}: it lies on {where}, and NCCL was opened on {self.device}"
            )
        with self._lock:
            if self._closed:
                raise ClosedError("this transport is closed")
            self._unfinished += 1
        try:
            event = self._group.launch(partial(self._run, task))
        except Exception as error:
            self._fail(task, error)
            return
        self._watcher.call_after(event, partial(self._finish, task, completion), partial(self._fail, task))

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
        values = task.data.view(getattr(torch, task.partition.dtype))
        with torch.no_grad():
            if task.verb == ALL_GATHER:
                if self._splits(values):
                    self._group.all_gather(self._chunks(values))
            elif values.dtype in (torch.float16, torch.bfloat16):
                wide = values.float()
                result = self._sum(task.verb, wide)
                self._same_part(values, task.verb).copy_(self._divide(result))
            else:
                result = self._sum(task.verb, values)
                if values.dtype != torch.uint8:  # sums of bytes wrap, and are not divided
                    self._divide(result)

    def _divide(self, total: torch.Tensor) -> torch.Tensor:
        # The divisor is a tensor on the device: given a host number, PyTorch's CUDA kernel multiplies by a rounded 1/n.
        return total.div_(total.new_full((), self.world_size))

    def _sum(self, verb: str, values: torch.Tensor) -> torch.Tensor:
        """Sum ``values`` over all ranks, and return the part of ``values`` that holds the sums."""
        if verb == REDUCE_SCATTER and self._splits(values):
            self._group.reduce_scatter(self._chunks(values))
        else:
            self._group.all_reduce(values)
        return self._same_part(values, verb)

    def _same_part(self, values: torch.Tensor, verb: str) -> torch.Tensor:
        return self._chunks(values)[self.rank] if verb == REDUCE_SCATTER and self._splits(values) else values

    def _splits(self, values: torch.Tensor) -> bool:
        """Whether no rank's chunk of ``values`` is empty. Otherwise the reduce-scatter task averages all of ``values``."""
        return values.numel() >= self.world_size

    def _chunks(self, values: torch.Tensor) -> list[torch.Tensor]:
        n = self.world_size
        return [values[values.numel() * r // n : values.numel() * (r + 1) // n] for r in range(n)]

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
            ours = TransportError(f"rank {self.rank} failed to {what}: {type(error).__name__}: {error}")
        self._verdict.report(ours)
