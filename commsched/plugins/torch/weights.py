"""Comparison of weights between ranks, while no update is outstanding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

import commsched

from ..common.weights_check import WeightsCheck
from .device import Device
from .guard import own_class, unguarded
from .slot import Slot


class ComparedWeights:
    """Compares the parameters of one optimizer, including frozen ones, between ranks. Some steps compare a part of them
    (``plugins/common/weights_check.py``).

    Nothing waits for the comparison. ``slots`` are by flag; ``label`` names the optimizer in messages.
    """

    def __init__(self, session: commsched.Session, device: Device, slots: Sequence[Slot], label: str) -> None:
        self._device = device
        self._slots = slots
        with unguarded():
            nbytes = [slot.parameter.nbytes if _is_comparable(slot.parameter, session.device) else 0 for slot in slots]
        self._check = WeightsCheck(session, [slot.name for slot in slots], nbytes, f"weights{label}")
        self._is_wanted = False

    def compare(self, step: int) -> None:
        """Compare a part of the parameters, if this step does so.

        Call it in ``step()``, when all updates of earlier steps are done and none of this step is outstanding yet. Then no
        other thread waits for a parameter in order to write to it.

        Raises:
            CommschedError: the job failed, or the session is closed.
        """
        if self._is_wanted:
            self._device.settle()  # wait for the digests of the last part, which was compared many steps ago
        self._is_wanted = self._check.begin(step)
        if not self._is_wanted:
            return
        with unguarded(), torch.inference_mode(False), torch.no_grad():
            for slot in self._slots:
                part = self._check.wanted(slot.flag)
                if part is not None:
                    values = slot.parameter.detach().reshape(-1).view(torch.uint8)[slice(*part)]
                    self._device.digest(values, partial(self._check.add, slot.flag))


def _is_comparable(parameter: torch.Tensor, device: str) -> bool:
    """Whether ``parameter`` is plain dense numbers in the memory of ``device``."""
    own = own_class(parameter)
    is_plain = getattr(own, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__
    return is_plain and parameter.layout == torch.strided and str(parameter.device) == device
