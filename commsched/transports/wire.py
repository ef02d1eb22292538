"""``wire=bfloat16|float16``: gradients are sent in 16 bits and averaged in 32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.device import Device
from ..core.interfaces import Calls, Completion, ForwardingTransport, Transport
from ..core.manifest import ITEMSIZE, Manifest, TensorSpec
from ..core.plan import Partition
from ..core.task import ALL_GATHER, REDUCE_SCATTER, CommTask, State
from .averaging.buffer_pool import BufferPool
from .averaging.reduce import narrow, widen


class DtypeMapping:
    """One group whose tensors are sent in another dtype: ``dtypes`` maps an original dtype to the dtype that is sent.

    ``manifest`` has the same tensors in the same order. A partition holds consecutive tensors of one dtype, so they are
    consecutive in the buffer of the other dtype too, whatever other tensors lie in that buffer.
    """

    def __init__(self, manifest: Manifest, dtypes: Mapping[str, str]) -> None:
        self._original = manifest
        self._dtypes = dtypes
        self.manifest = Manifest(
            tuple(TensorSpec(spec.name, spec.shape, dtypes.get(spec.dtype, spec.dtype)) for spec in manifest.tensors),
            norms=manifest.norms,
        )

    def partition(self, original: Partition) -> Partition:
        """Return the partition of ``manifest`` that holds the tensors of ``original``.

        Raises:
            ValueError: the tensors are not consecutive there.
        """
        dtype = self._dtypes.get(original.dtype, original.dtype)
        before, after = ITEMSIZE[original.dtype], ITEMSIZE[dtype]

        def place(tensor: int, offset: int) -> int:
            return self.manifest.offset(tensor) + (offset - self._original.offset(tensor)) // before * after

        start = place(original.tensors[0], original.start)
        stop = place(original.tensors[-1], original.stop)
        if stop - start != original.nbytes // before * after:
            raise ValueError(f"partition {original.index} holds tensors that are not consecutive")
        return Partition(original.index, dtype, start, stop, original.tensors, original.server)

    def task(self, original: CommTask, data: Any) -> CommTask:
        """Return a started task that applies the verb of ``original`` to ``data``."""
        partition, of = self.partition(original.partition), original
        return CommTask(of.group, of.step, partition, data, of.verb, of.channel, of.sequence, of.order, State.STARTED)


class WireTransport(ForwardingTransport):
    """Averages float32 partitions through ``inner`` as ``dtype``, which is ``bfloat16`` or ``float16``.

    Partitions of other dtypes pass unchanged. Each rank's contribution is rounded to nearest even. ``inner`` sums the
    contributions in float32 and rounds the average once. Every rank gets that average, bit for bit. A float16 holds up to
    65504. Greater values arrive as infinity, which code that scales losses takes for an overflow, as it should. NaN stays NaN.
    bfloat16 has the range of float32.

    With a hierarchy, ``hierarchy.leader`` narrows float32 instead of this transport. It rounds the sum over the ranks of a
    host. In float16 that sum overflows where gradients exceed 65504 divided by the number of those ranks.

    The 16-bit averages of a reduce-scatter are kept for the all-gather of the same partition, and not rounded a second time.
    """

    def __init__(self, inner: Transport, dtype: str) -> None:
        super().__init__(inner)
        self._dtype = dtype
        self._buffers = BufferPool()
        self._groups: dict[int, DtypeMapping] = {}
        self._scattered: dict[tuple[int, int], memoryview] = {}  # by group and partition, between the two tasks

    def add_group(self, group: int, manifest: Manifest) -> None:
        recast = self._groups[group] = DtypeMapping(manifest, {"float32": self._dtype})
        self._inner.add_group(group, recast.manifest)

    def mirror(self, group: int, manifest: Manifest, device: Device) -> None:
        """See ``interfaces.Transport``. ``inner`` gets the gradients in memory of this transport."""

    def start(self, task: CommTask, completion: Completion) -> None:
        """See ``interfaces.Transport``. Rounds the contribution before it returns."""
        recast = self._groups[task.group]
        if task.partition.dtype != "float32":
            calls = Calls(lambda inner: completion.on_sent(task), lambda inner: completion.on_done(task))
            return self._inner.start(recast.task(task, task.data), calls)
        scattered = self._scattered.pop((task.group, task.partition.index), None)
        if task.verb == ALL_GATHER and scattered is not None:
            narrowed = scattered
        else:
            narrowed = self._buffers.take(task.nbytes // 2)
            narrow(task.data, self._dtype, narrowed)

        def arrived(inner: CommTask) -> None:
            widen(inner.data, self._dtype, task.data)
            if task.verb == REDUCE_SCATTER:
                self._scattered[task.group, task.partition.index] = inner.data
            completion.on_done(task)

        self._inner.start(recast.task(task, narrowed), Calls(lambda inner: completion.on_sent(task), arrived))

    def release(self, group: int) -> None:
        del self._groups[group]
        for key in list(self._scattered):  # other threads add theirs meanwhile
            if key[0] == group:
                self._scattered.pop(key, None)
        super().release(group)

    def close(self, graceful: bool = True) -> None:
        super().close(graceful)
        self._scattered.clear()
