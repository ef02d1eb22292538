"""Tasks as a transport inside another sees them: with other dtypes, and so at other places of other buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.manifest import ITEMSIZE, Manifest, TensorSpec
from ..core.plan import Partition
from ..core.task import CommTask, State


class Recast:
    """One group whose tensors of the dtypes in ``dtypes`` travel as those they map to.

    ``manifest`` has the same tensors in the same order, so consecutive ones of one dtype, which is what a partition holds, are
    consecutive in the buffer of the other too, whatever else comes to lie in it.
    """

    def __init__(self, manifest: Manifest, dtypes: Mapping[str, str]) -> None:
        self._original = manifest
        self._dtypes = dtypes
        self.manifest = Manifest(
            tuple(TensorSpec(spec.name, spec.shape, dtypes.get(spec.dtype, spec.dtype)) for spec in manifest.tensors)
        )

    def partition(self, original: Partition) -> Partition:
        """Where ``original`` is in the other manifest.

        Raises:
            ValueError: its tensors are not consecutive there.
        """
        dtype = self._dtypes.get(original.dtype, original.dtype)
        before, after = ITEMSIZE[original.dtype], ITEMSIZE[dtype]

        def place(tensor: int, offset: int) -> int:
            return self.manifest.offset(tensor) + (offset - self._original.offset(tensor)) // before * after

        start = place(original.tensors[0], original.start)
        stop = place(original.tensors[-1], original.stop)
        if stop - start != original.nbytes // before * after:
            raise ValueError(f"partition {original.index} holds tensors that are not consecutive")
        return Partition(original.index, dtype, start, stop, original.tensors)

    def task(self, original: CommTask, data: Any) -> CommTask:
        """A task that does for ``data`` what ``original`` does for its own; already started."""
        task = CommTask(original.group, original.step, self.partition(original.partition), data, original.verb)
        task.order, task.channel, task.sequence = original.order, original.channel, original.sequence
        task.state = State.STARTED
        return task
