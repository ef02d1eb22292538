"""Parameters that lie in the same memory, as two objects."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def find_overlap(named: Mapping[str, torch.Tensor], trained: set[int]) -> tuple[str, str] | None:
    """The names of two tensors of which at least one is of ``trained`` (ids), and that may lie in the same bytes: an update of
    one changes the other. Views of one buffer that lie side by side do not."""
    extents = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent_bytes(tensor), name)
        for name, tensor in named.items()
        if tensor.layout == torch.strided and tensor.numel() > 0 and tensor.data_ptr() != 0
    )
    reach, widest = 0, ""  # of those so far: the last byte, and whose it is
    for start, end, name in extents:
        if start < reach and named[name] is not named[widest] and {id(named[name]), id(named[widest])} & trained:
            return widest, name
        if end > reach:
            reach, widest = end, name
    return None


def _extent_bytes(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()
