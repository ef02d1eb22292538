"""The order of layers, as the first forward shows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .device import Device
from .guard import guard, release
from .slot import Slot

_local = threading.local()


@contextmanager
def no_use() -> Iterator[None]:
    """What this thread reads within is no use: it broadcasts a model of which another optimizer notes the order."""
    _local.is_no_use = True
    try:
        yield
    finally:
        _local.is_no_use = False


class FirstUse:
    """In which order the parameters are first used. Parameters never used come last, as registered."""

    def __init__(self, slots: Sequence[Slot], device: Device) -> None:
        self._slots = slots
        self._device = device
        self._order: list[int] = []  # flags
        self.is_open = True
        for slot in slots:
            guard(slot.parameter, self._make_recorder(slot))

    def _make_recorder(self, slot: Slot) -> Callable[[], None]:
        def record() -> None:
            if getattr(_local, "is_no_use", False):
                return
            release(slot.parameter)
            self._device.read()
            self._order.append(slot.flag)

        return record

    def end(self) -> None:
        """Note no more."""
        self.is_open = False
        for slot in self._slots:
            release(slot.parameter)

    def order(self) -> list[int]:
        """The flags of all slots, by what was noted so far."""
        seen = set(self._order)
        return self._order + [slot.flag for slot in self._slots if slot.flag not in seen]

    def unseen(self) -> str | None:
        """The name of a parameter that has a gradient, so was used, but whose use was not noted; None: there is none."""
        seen = set(self._order)
        return next((slot.name for slot in self._slots if slot.has_gradient and slot.flag not in seen), None)
