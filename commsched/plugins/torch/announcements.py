"""Announcements: what live ranks do, so that a rank that has run out of batches can take part in it (see join.py)."""

from __future__ import annotations

import torch

import commsched

from ...core import timeouts
from ...core.errors import UnsupportedError
from ...core.manifest import TensorSpec
from .device import Device, register_on


class Announcements:
    """Messages to which each rank contributes. A live rank says what it does, as a number, and all live ranks say the same. The
    last message of a rank that an exception makes leave says so.

    Two groups take turns: a rank may contribute to the message after one that is not complete, so it can leave at once.
    """

    def __init__(self, session: commsched.Session, device: Device) -> None:
        spec = TensorSpec("commsched.announced", (4,), "float64")
        self._turns = [(group, said) for group, (said,) in (register_on(session, device, [spec]) for _ in range(2))]
        self._session = session
        self._device = device

    @property
    def count(self) -> int:
        """The number of messages to which this rank has contributed."""
        return sum(group.next_step for group, _ in self._turns)

    def say(self, device: Device, live: bool, number: int, *, broken: bool = False) -> None:
        """Contribute to the next message. Waits until all ranks have contributed to the one before the last. ``broken``: an
        exception makes this rank leave."""
        group, said = self._turns[self.count % 2]
        group.begin_step()
        self._device = device
        with device.copying():
            said.copy_(torch.tensor([live, number, number**2, broken], dtype=torch.float64, device="cpu"))
        group.notify_ready(0)

    def hear(self) -> tuple[float, int]:
        """Wait until all ranks have contributed to the last message. Return the share of live ranks and what they said. Raises
        UnsupportedError if a rank has left by an exception, or if some are exhausted and the live ranks do different things;
        or the failure of the session."""
        group, said = self._turns[(self.count - 1) % 2]
        group.proxies[0].wait()
        with self._device.copying():
            live, number, square, broken = said.tolist()
        if broken:
            # Nobody may catch it: the failure that it causes then says more.
            raise self._session.await_failure(timeouts.RAISE_SECONDS) or UnsupportedError(
                "another rank has left the Join by an exception, and has caught it outside: catch it within the Join, or on "
                "all ranks at the same place"
            )
        if live in (0.0, 1.0):
            return live, round(number)
        number, square = number / live, square / live
        if abs(square - number**2) > 0.1:
            raise UnsupportedError(
                "a rank has run out of batches, and the backward passes of the others reach the optimizers of the Join in "
                "different orders: call backward and step() of several optimizers in the same order on all ranks"
            )
        return live, round(number)
