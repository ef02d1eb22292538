"""WireTransport: float32 travels as a 16-bit type, for half the bytes."""

from __future__ import annotations

from ..core.manifest import Manifest
from ..core.ports import Completion, Transport
from ..core.task import ALL_GATHER, REDUCE_SCATTER, CommTask
from .buffers import BufferPool
from .recast import Recast
from .reduce import narrow, widen


class WireTransport:
    """Averages float32 partitions through ``inner`` as ``dtype``, ``bfloat16`` or ``float16``; others as they are.

    Each rank's contribution is rounded, to nearest even; ``inner`` sums what came in float32 and rounds the average once; that
    is what every rank gets, bit for bit. A float16 holds up to 65504: what is greater arrives as infinity, which code that
    scales losses takes for an overflow, as it is meant to. NaN stays NaN. bfloat16 has the range of float32.

    With a hierarchy float32 is narrowed by ``host.leader`` and not here: what is rounded then is the sum over the ranks of a
    host. As a float16 it overflows where gradients exceed 65504 divided by the number of those ranks.

    A reduce-scatter's 16-bit averages are kept for the all-gather of the same partition, and not rounded a second time.
    """

    def __init__(self, inner: Transport, dtype: str) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.ordered = inner.ordered
        self.channels = inner.channels
        self.verbs = inner.verbs
        self._inner = inner
        self._dtype = dtype
        self._buffers = BufferPool()
        self._groups: dict[int, Recast] = {}
        self._scattered: dict[tuple[int, int], memoryview] = {}  # by group and partition, between their two tasks

    def add_group(self, group: int, manifest: Manifest) -> None:
        """See ``ports.Transport``."""
        recast = self._groups[group] = Recast(manifest, {"float32": self._dtype})
        self._inner.add_group(group, recast.manifest)

    def start(self, task: CommTask, completion: Completion) -> None:
        """See ``ports.Transport``. Rounds the contribution before it returns."""
        recast = self._groups[task.group]
        if task.partition.dtype != "float32":
            self._inner.start(recast.task(task, task.data), _Passed(task, completion))
            return
        scattered = self._scattered.pop((task.group, task.partition.index), None)
        if task.verb == ALL_GATHER and scattered is not None:
            narrowed = scattered
        else:
            narrowed = self._buffers.take(task.nbytes // 2)
            narrow(task.data, self._dtype, narrowed)
        self._inner.start(recast.task(task, narrowed), _Narrowed(self, task, completion))

    def release(self, group: int) -> None:
        """See ``ports.Transport``."""
        del self._groups[group]
        self._inner.release(group)

    def leave(self, rank: int) -> None:
        """See ``ports.Transport``."""
        self._inner.leave(rank)

    def close(self, graceful: bool = True) -> None:
        """See ``ports.Transport``."""
        self._inner.close(graceful)
        self._scattered.clear()

    def arrived(self, task: CommTask, narrowed: CommTask) -> None:
        """``narrowed`` holds the result of ``task``: put it there. The inner transport's thread."""
        widen(narrowed.data, self._dtype, task.data)
        if task.verb == REDUCE_SCATTER:
            self._scattered[task.group, task.partition.index] = narrowed.data


class _Passed:
    """Tells the completion of an inner task as that of the outer one."""

    def __init__(self, task: CommTask, completion: Completion) -> None:
        self._task = task
        self._completion = completion

    def on_sent(self, task: CommTask) -> None:
        self._completion.on_sent(self._task)

    def on_done(self, task: CommTask) -> None:
        self._completion.on_done(self._task)


class _Narrowed(_Passed):
    """As well puts the result in its place."""

    def __init__(self, wire: WireTransport, task: CommTask, completion: Completion) -> None:
        super().__init__(task, completion)
        self._wire = wire

    def on_done(self, task: CommTask) -> None:
        self._wire.arrived(self._task, task)
        super().on_done(task)
