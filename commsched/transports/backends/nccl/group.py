"""The collectives on a device that the transport needs (DeviceGroup), by torch's NCCL process group (NcclGroup)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ....core.device_events import Event


class DeviceGroup(Protocol):
    """Collectives over all ranks, on one queue of the device. All methods but ``abort`` are called by one thread at a time.

    ``all_reduce``, ``reduce_scatter`` and ``all_gather`` are called within the ``work`` given to :meth:`launch`, and take
    contiguous tensors on :attr:`device`.
    """

    device: torch.device

    def all_reduce(self, values: torch.Tensor) -> None:
        """Replace ``values`` by the sum of all ranks' ``values``."""
        ...

    def reduce_scatter(self, chunks: Sequence[torch.Tensor]) -> None:
        """Replace this rank's own chunk, ``chunks[rank]``, by its sum over all ranks. The other chunks become undefined."""
        ...

    def all_gather(self, chunks: Sequence[torch.Tensor]) -> None:
        """Replace each ``chunks[r]`` by the own chunk of rank ``r``. The chunks lie one after another in memory."""
        ...

    def launch(self, work: Callable[[], None]) -> Event:
        """Run ``work``, which queues its operations on the device after all earlier launches. The event marks their end."""
        ...

    def error(self) -> str:
        """Return what broke the group, or an empty string. An operation that ended because it was aborted gives no result."""
        ...

    def abort(self) -> None:
        """End all launched operations, and release everything, without waiting for other ranks. Thread-safe."""
        ...

    def close(self) -> None:
        """Release everything. Call it when no launched operation is outstanding."""
        ...


class NcclGroup:
    """See ``DeviceGroup``. It uses ``torch.distributed``'s NCCL process group, with a stream of high priority, so that
    the kernels that move data get their share of the device beside the kernels of the training.

    Depending on its version, torch launches collectives on the current stream or on a stream of its own. ``Work.wait`` makes
    the current stream, which is ours, wait for them, and not the host. An event recorded on our stream afterwards marks the end
    of the collective.
    """

    def __init__(self, store: Store, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options(is_high_priority_stream=True)
        options._timeout = timeout
        self.device = device
        self._rank = rank
        self._group = nccl(store, rank, world_size, options)
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._aborted = False
        self._lock = threading.Lock()

    def all_reduce(self, values: torch.Tensor) -> None:
        self._group.allreduce([values]).wait()

    def reduce_scatter(self, chunks: Sequence[torch.Tensor]) -> None:
        own = chunks[self._rank]
        if (whole := _as_one(chunks)) is not None:
            self._group._reduce_scatter_base(own, whole).wait()
        else:  # torch makes it a group of reductions, one to each rank
            self._group.reduce_scatter([own], [list(chunks)]).wait()

    def all_gather(self, chunks: Sequence[torch.Tensor]) -> None:
        own = chunks[self._rank]
        if (whole := _as_one(chunks)) is not None:
            self._group._allgather_base(whole, own).wait()
        else:  # torch makes it a group of broadcasts, one from each rank
            self._group.allgather([list(chunks)], [own]).wait()

    def launch(self, work: Callable[[], None]) -> Event:
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
        with torch.cuda.stream(self._stream):
            work()
            event.record(self._stream)
        return event

    def error(self) -> str:
        if self._aborted:
            return "it was aborted"
        state: Any = self._group.get_error()
        return "" if state.name == "SUCCESS" else f"NCCL reports {state.name}"

    def abort(self) -> None:
        with self._lock:
            aborted, self._aborted = self._aborted, True  # set before the abort can end a launched operation
        if not aborted:
            self._group.abort()

    def close(self) -> None:
        if not self._aborted:
            self._group.shutdown()


def _as_one(chunks: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return consecutive chunks of equal size as one tensor, which saves copies, or None if their sizes differ."""
    first = chunks[0]
    if any(chunk.numel() != first.numel() for chunk in chunks):
        return None
    return first.as_strided((first.numel() * len(chunks),), (1,))
