"""Flat buffers of registered tensors, as PyTorch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

import commsched

from ...core.errors import UnsupportedError
from ...core.group import TensorGroup
from ...core.manifest import Manifest, TensorSpec
from ..common.flat import register_flat
from .device import Device

_DTYPES = {getattr(torch, name): name for name in ("float16", "bfloat16", "float32", "float64")}


def spec_of(name: str, parameter: torch.Tensor) -> TensorSpec:
    """Return the spec by which the gradient of ``parameter`` is registered.

    Raises:
        UnsupportedError: its type or layout cannot be averaged.
    """
    if parameter.dtype not in _DTYPES or parameter.layout != torch.strided:
        raise UnsupportedError(
            f"parameter '{name}' is {parameter.dtype}, {parameter.layout}; only dense gradients of "
            f"{', '.join(map(str, _DTYPES))} can be averaged"
        )
    return TensorSpec(name, tuple(parameter.shape), _DTYPES[parameter.dtype])


def register_on(
    session: commsched.Session, device: Device, specs: Sequence[TensorSpec]
) -> tuple[TensorGroup, list[torch.Tensor]]:
    """Register tensors, in forward order, in new flat buffers on ``device``. See :func:`register_flat`."""
    return register_flat(session, Manifest(tuple(specs)), as_dtype=partial(getattr, torch), allocate=device.allocate)
