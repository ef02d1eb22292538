"""While an update is made, its optimizer finds the averages in ``.grad``, as it would find gradients in plain training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .guard import unguarded
from .slot import Slot


@dataclass(frozen=True)
class Lent:
    """What one parameter's ``.grad`` is during the update."""

    slot: Slot
    before: torch.Tensor | None  # what it was
    gradient: torch.Tensor
    version: int  # of ``gradient``, if it is a copy


def lend(slots: Sequence[Slot]) -> list[Lent]:
    """Put the averages, which must be there, into ``.grad``.

    Raises:
        UnsupportedError: the user has moved their memory; then nothing is put anywhere.
    """
    with unguarded(), torch.inference_mode(False), torch.no_grad():
        for slot in slots:
            slot.require_in_buffer()
        lent = []
        for slot in slots:
            gradient = _strided_like_parameter(slot)
            lent.append(Lent(slot, slot.parameter.grad, gradient, gradient._version))
            slot.parameter.grad = gradient
        return lent


def _strided_like_parameter(slot: Slot) -> torch.Tensor:
    """Fused optimizers go through parameter and gradient in the order of memory, as autograd makes gradients strided like
    their parameters; the flat buffer is contiguous."""
    gradient, parameter = slot.gradient, slot.parameter
    if slot.rows is not None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def take_back(lent: Sequence[Lent], deferred: bool) -> None:
    """Leave ``.grad`` as it was before :func:`lend`, but for what the optimizer has put there instead.

    None is what a rank finds there that did not use the parameter. ``deferred``: ``step()`` was called before, so what is
    there instead of the average came after the update, from ``zero_grad()`` say.
    """
    with unguarded(), torch.inference_mode(False), torch.no_grad():
        for each in lent:
            slot, now = each.slot, each.slot.parameter.grad
            if each.gradient is not slot.gradient and each.gradient._version != each.version:
                slot.gradient.copy_(each.gradient)
            set_later = deferred and now is not None and each.before is not slot.gradient
            if now is each.gradient or set_later:
                slot.parameter.grad = each.before
