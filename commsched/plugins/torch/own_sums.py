"""Gradients of backward passes within ``no_sync()``: until they are averaged, each rank has its own."""

from __future__ import annotations

import torch

from .agreement import norm
from .guard import guard, release, unguarded
from .slot import Slot


class OwnSums:
    """Notes what backward has made of gradients that do not travel yet, to tell whether the user has changed them since.

    It costs nothing until a gradient is read; then one norm, as what is read through ``.data`` may be changed without a trace.
    """

    def __init__(self) -> None:
        self._sums: dict[Slot, _OwnSum] = {}

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._sums

    def note(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Backward has added to ``gradient``, the ``.grad`` of ``slot``."""
        known = self._sums.get(slot)
        if known is not None:
            release(known.gradient)
        self._sums[slot] = _OwnSum(gradient)

    def forget(self) -> None:
        """They travel from here on."""
        for own in self._sums.values():
            release(own.gradient)
        self._sums.clear()

    def changed(self) -> str | None:
        """The name of a parameter whose gradient is not what backward made, nor dropped, nor zeros; None: there is none."""
        with unguarded():
            return next((slot.name for slot, own in self._sums.items() if own.is_changed(slot.parameter.grad)), None)


class _OwnSum:
    def __init__(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient
        self._version = gradient._version
        self._norm: float | None = None  # when it was first read
        guard(gradient, self._read)

    def _read(self) -> None:
        release(self.gradient)
        self._norm = norm(self.gradient)

    def is_changed(self, gradient: torch.Tensor | None) -> bool:
        if gradient is None:
            return False
        as_it_was = (
            gradient is self.gradient
            and gradient._version == self._version
            and (self._norm is None or norm(gradient) == self._norm)
        )
        return not as_it_was and norm(gradient) != 0.0
