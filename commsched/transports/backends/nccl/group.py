"""DeviceGroup: the collectives on a device that the transport needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

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
