"""Announcements: what live ranks do, so that a rank that has run out of batches can take part in it (see join.py)."""

from __future__ import annotations

import torch

import commsched

from ...core.errors import UnsupportedError
from ...core.manifest import TensorSpec
from .device import Device, register_on


class Announcements:
    """Messages to which each rank contributes. A live rank says what it does, as a number, and all live ranks say the same."""

    def __init__(self, session: commsched.Session, device: Device) -> None:
        self._group, (self._said,) = register_on(session, device, [TensorSpec("commsched.announced", (3,), "float64")])
        self._device = device

    @property
    def count(self) -> int:
        """The number of messages to which this rank has contributed."""
        return self._group.next_step

    def say(self, device: Device, live: bool, number: int) -> None:
        """Contribute to the next message. Waits until all ranks have contributed to the last one."""
        self._group.begin_step()
        self._device = device
        with device.copying():
            self._said.copy_(torch.tensor([live, number, number**2], dtype=torch.float64, device="cpu"))
        self._group.notify_ready(0)

    def hear(self) -> tuple[float, int]:
        """Wait until all ranks have contributed to the last message. Return the share of live ranks and what they said. Raises
        UnsupportedError if some are exhausted, and the live ranks do different things."""
        self._group.proxies[0].wait()
        with self._device.copying():
            live, number, square = self._said.tolist()
        if live in (0.0, 1.0):
            return live, round(number)
        number, square = number / live, square / live
        if abs(square - number**2) > 0.1:
            raise UnsupportedError(
                "a rank has run out of batches, and the backward passes of the others reach the optimizers of the Join in "
                "different orders: call backward and step() of several optimizers in the same order on all ranks"
            )
        return live, round(number)
