"""What the flat buffers of a manifest must be like."""

from __future__ import annotations

from collections.abc import Mapping

from .manifest import Manifest
from .ports import Sliceable


def require_buffers(manifest: Manifest, buffers: Mapping[str, Sliceable], device: str) -> None:
    """Refuse what is no place for the averages of ``manifest`` on ``device``: they would go to a copy (slices of a
    ``bytearray`` are copies), or to other elements.

    Raises:
        ValueError: a buffer is missing or has another size, or is not writable bytes in one piece; says which, and why.
    """
    for dtype, nbytes in manifest.buffer_bytes.items():
        if dtype not in buffers:
            raise ValueError(f"there is no buffer for {dtype}, of {nbytes} bytes")
        require_buffer(buffers[dtype], f"the buffer for {dtype}", device)
        if len(buffers[dtype]) != nbytes:
            raise ValueError(f"the buffer for {dtype} has {len(buffers[dtype])} bytes; its tensors have {nbytes}")


def require_buffer(buffer: Sliceable, name: str, device: str) -> None:
    """
    Raises:
        ValueError: ``buffer`` is not what is averaged on ``device``; calls it ``name``.
    """
    if device != "cpu":  # whose arrays only the engine knows
        if isinstance(buffer, memoryview | bytes | bytearray):
            raise ValueError(f"{name} is in the host's memory, but averages are made on {device}")
    elif not isinstance(buffer, memoryview):
        raise ValueError(f"{name} is a {type(buffer).__name__}; give a memoryview of its bytes")
    elif (buffer.format, buffer.ndim) != ("B", 1) or not buffer.c_contiguous:
        what = f"format {buffer.format!r}, shape {buffer.shape}, {'' if buffer.c_contiguous else 'not '}in one piece"
        raise ValueError(f"{name} is no flat view of bytes ({what}); give one piece of memory, with cast('B')")
    elif buffer.readonly:
        raise ValueError(f"{name} may not be written to")
