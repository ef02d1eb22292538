"""Flat buffers of registered tensors, as PyTorch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import commsched

from ...core.errors import UnsupportedError
from ...core.group import TensorGroup
from ...core.manifest import ITEMSIZE, Manifest, TensorSpec
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


def register_flat(
    session: commsched.Session, device: Device, specs: Sequence[TensorSpec]
) -> tuple[list[torch.Tensor], TensorGroup]:
    """Register tensors, in forward order, in new flat buffers. Return each tensor's view and the group. Collective.

    Raises:
        ManifestMismatch: the ranks' tensors differ.
    """
    manifest = Manifest(tuple(specs))
    flat = {dtype: device.allocate(nbytes) for dtype, nbytes in manifest.buffer_bytes.items()}
    views = []
    for tensor, spec in enumerate(manifest.tensors):
        start = manifest.offset(tensor) // ITEMSIZE[spec.dtype]
        values, _ = flat[spec.dtype]
        views.append(values.view(getattr(torch, spec.dtype))[start : start + spec.numel].view(spec.shape))
    return views, session.register(manifest, {dtype: buffer for dtype, (_, buffer) in flat.items()})
