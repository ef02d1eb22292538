"""Flat buffers, and views of them as arrays of an engine. Shared by plugins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import commsched

from ...core.group import TensorGroup
from ...core.manifest import Manifest


def _allocate(nbytes: int) -> tuple[Any, memoryview]:
    memory = np.zeros(nbytes, np.uint8)
    return memory, memory.data


def register_flat(
    session: commsched.Session,
    manifest: Manifest,
    *,
    as_dtype: Callable[[str], Any] = np.dtype,
    allocate: Callable[[int], tuple[Any, Any]] = _allocate,
) -> tuple[TensorGroup, list[Any]]:
    """Register the tensors of ``manifest`` in new flat buffers of zeros. Collective.

    Args:
        as_dtype: returns the engine's type for a dtype's name. numpy does not know all types that engines have, such as
            bfloat16.
        allocate: returns so many zero bytes, as an array of uint8 and as ``Session.register`` takes them. The default is a
            numpy array.

    Returns:
        The group, and for each tensor a view of its place in a flat buffer.

    Raises:
        ManifestMismatch: see ``Session.register``.
    """
    flat = {dtype: allocate(nbytes) for dtype, nbytes in manifest.buffer_bytes.items()}
    views = []
    for tensor, spec in enumerate(manifest.tensors):
        values, start = flat[spec.dtype][0], manifest.offset(tensor)
        views.append(values[start : start + spec.nbytes].view(as_dtype(spec.dtype)).reshape(spec.shape))
    return session.register(manifest, {dtype: buffer for dtype, (_, buffer) in flat.items()}), views
