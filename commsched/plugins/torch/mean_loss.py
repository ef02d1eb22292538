"""The mean of the ranks' losses, so that a closure returns the same loss on all ranks."""

from __future__ import annotations

from typing import Any

import torch

import commsched


def mean_loss(session: commsched.Session, loss: Any) -> Any:
    """Return the mean of ``loss`` over all ranks, if it is a number or a tensor of one element on all ranks. Otherwise return
    ``loss`` unchanged. Collective."""
    is_tensor = isinstance(loss, torch.Tensor) and loss.numel() == 1
    own = float(loss.detach() if is_tensor else loss).hex() if is_tensor or isinstance(loss, int | float) else None
    all_ranks = session.gather(own, "to average the loss of a closure")
    if None in all_ranks:
        return loss
    mean = sum(map(float.fromhex, all_ranks)) / len(all_ranks)
    return torch.full_like(loss.detach(), mean) if is_tensor else mean
