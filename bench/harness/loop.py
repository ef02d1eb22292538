"""Training loops between the loss and the update, as users write them: plain, clipping by a norm, or with loss scaling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

#: A power of two: loss scaling then changes no bit of a weight. All gradients of the models stay finite with it.
_LOSS_SCALE = 1024.0


class Loop:
    """One training loop.

    Args:
        clip: ``"norm"`` calls ``clip_grad_norm_`` with ``max_norm`` before each update. ``"scaler"`` trains with a
            ``GradScaler``. None does neither.
        device: device of the gradients.
    """

    def __init__(self, clip: str | None = None, max_norm: float = 0.0, device: str = "cpu") -> None:
        self.clips = clip is not None
        self._max_norm = max_norm if clip == "norm" else None
        self._scaler = torch.amp.GradScaler(torch.device(device).type, _LOSS_SCALE) if clip == "scaler" else None

    def backward(self, loss: torch.Tensor, within: AbstractContextManager[Any] | None = None) -> None:
        """Run backward in the context ``within``."""
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        with within or nullcontext():
            scaled.backward()

    def step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Clip or check the gradients, and make the update."""
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self._max_norm)
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()
