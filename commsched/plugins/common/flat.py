"""Flat buffers as numpy arrays, for plugins of engines whose gradients numpy can see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.manifest import Manifest


def lay_out(manifest: Manifest, as_dtype: Callable[[str], Any] = np.dtype) -> tuple[dict[str, memoryview], list[NDArray[Any]]]:
    """Allocate a flat buffer of zeros for each dtype of ``manifest``.

    Args:
        as_dtype: returns numpy's type for a dtype's name. An engine may know types that numpy does not, such as bfloat16.

    Returns:
        The buffers by dtype, as ``Session.register`` takes them, and for each tensor a view of its range.
    """
    flat = {dtype: np.zeros(nbytes, np.uint8) for dtype, nbytes in manifest.buffer_bytes.items()}
    places = []
    for tensor, spec in enumerate(manifest.tensors):
        start = manifest.offset(tensor)
        places.append(flat[spec.dtype][start : start + spec.nbytes].view(as_dtype(spec.dtype)).reshape(spec.shape))
    return {dtype: buffer.data for dtype, buffer in flat.items()}, places
