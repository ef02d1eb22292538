"""DeviceGroup: the collectives that the transport needs of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ...core.event_watcher import Event


class DeviceGroup(Protocol):
    """Collectives over all ranks on one queue of the device. All but ``abort`` are called by one thread at a time.

    The first three are called within the ``work`` given to :meth:`launch`, and take contiguous tensors of :attr:`device`.
    """

    device: torch.device

    def all_reduce(self, values: torch.Tensor) -> None:
        """Put the sum of all ranks' ``values`` in their place."""
        ...

    def reduce_scatter(self, chunks: Sequence[torch.Tensor]) -> None:
        """Put the sum of all ranks' ``chunks[rank]`` in place of this rank's; the neighbouring chunks become undefined."""
        ...

    def all_gather(self, chunks: Sequence[torch.Tensor]) -> None:
        """Put every rank's own chunk in place of ``chunks[that rank]``. The chunks lie one after another in memory."""
        ...

    def launch(self, work: Callable[[], None]) -> Event:
        """Queue what ``work`` does on the device, after all that was launched before; the event is its end."""
        ...

    def error(self) -> str:
        """What broke the group, or nothing. An operation that ended because it was aborted leaves no result."""
        ...

    def abort(self) -> None:
        """End what is launched, and give everything back, without waiting for other ranks. Any thread."""
        ...

    def close(self) -> None:
        """Give everything back when nothing is launched."""
        ...
