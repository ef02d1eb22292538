"""One number that tells gradients apart which have the same norm."""

from __future__ import annotations

import math
from functools import cache

import torch

_LENGTH = 1 << 14  # of the direction: longer tensors go along it piece by piece
_BLOCK = 1 << 20  # elements that are widened at a time


def projection(values: torch.Tensor) -> float:
    """Onto a fixed direction without regard to what the values are. 0.0: it is not finite.

    Summed in the type of the values, in 32 bits at least, over pieces of the direction's length; these in float64.
    """
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    direction = _direction(str(values.device), dtype)
    pieces = []
    for block in values.detach().reshape(-1).split(_BLOCK):
        block = block.to(dtype)
        whole = len(block) // _LENGTH * _LENGTH
        if whole:
            pieces.append(block[:whole].view(-1, _LENGTH) @ direction)
        if whole < len(block):
            pieces.append(torch.dot(block[whole:], direction[: len(block) - whole]).view(1))
    if len(pieces) == 1 and len(pieces[0]) == 1:
        length = float(pieces[0])
    else:
        sums = torch.cat(pieces).double() if pieces else values.new_zeros(0, dtype=torch.float64)
        length = float(sums @ torch.arange(len(sums), dtype=torch.float64, device=values.device).cos())
    return length if math.isfinite(length) else 0.0


@cache
def _direction(device: str, dtype: torch.dtype) -> torch.Tensor:
    """Components between -1 and 1."""
    generator = torch.Generator().manual_seed(20191027)
    return torch.rand(_LENGTH, generator=generator, dtype=torch.float64).mul_(2).sub_(1).to(device, dtype)
