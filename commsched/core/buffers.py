"""Checks of the flat buffers of a manifest."""

from __future__ import annotations

from collections.abc import Mapping

from .interfaces import Buffer
from .manifest import Manifest


def require_buffers(manifest: Manifest, buffers: Mapping[str, Buffer], device: str) -> None:
    """Check that ``buffers`` can receive the averages of ``manifest`` on ``device``. Into other buffers, averages would be
    written to a copy (slices of a ``bytearray`` are copies) or to the wrong elements.

    Raises:
        ValueError: a buffer is missing, has the wrong size, or is not writable contiguous bytes; the message names the buffer
            and the reason.
    """
    for dtype, nbytes in manifest.buffer_bytes.items():
        if dtype not in buffers:
            raise ValueError(f"there is no buffer for {dtype}, of {nbytes} bytes")
        require_buffer(buffers[dtype], f"the buffer for {dtype}", device)
        if len(buffers[dtype]) != nbytes:
            raise ValueError(f"the buffer for {dtype} has {len(buffers[dtype])} bytes; its tensors have {nbytes}")


def require_buffer(buffer: Buffer, name: str, device: str) -> None:
    """Check that ``buffer`` is of a kind that can be averaged on ``device``.

    Raises:
        ValueError: it is not; the message calls it ``name``.
    """
    if device != "cpu":  # only the engine knows the type of the device's arrays
        if isinstance(buffer, memoryview | bytes | bytearray):
            raise ValueError(f"{name} is in the host's memory, but averages are made on {device}")
    elif not isinstance(buffer, memoryview):
        raise ValueError(f"{name} is a {type(buffer).__name__}; give a memoryview of its bytes")
    elif (buffer.format, buffer.ndim) != ("B", 1) or not buffer.c_contiguous:
        what = f"format {buffer.format!r}, shape {buffer.shape}, {'' if buffer.c_contiguous else 'not '}in one piece"
        raise ValueError(f"{name} is no flat view of bytes ({what}); give one piece of memory, with cast('B')")
    elif buffer.readonly:
        raise ValueError(f"{name} may not be written to")
