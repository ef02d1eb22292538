"""Memory that the ranks of a host share: a second copy of each group's flat buffers, which the other ranks can read.

The memory is anonymous (``memfd``) and passed over a socket. It has no name that could be guessed or left behind, and is freed
with the last process that holds it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os

from ...core.errors import ProtocolError, TransportError
from ...core.manifest import Manifest

_PAGE = mmap.PAGESIZE


class SharedBuffers:
    """The flat buffers of a group in shared memory, each beginning on a page.

    The memory is unmapped when the last view of it is gone.
    """

    def __init__(self, manifest: Manifest, memory: mmap.mmap) -> None:
        self._starts, nbytes = _places(manifest)
        if len(memory) != nbytes:
            raise ProtocolError(f"{len(memory)} bytes of memory for a group that needs {nbytes}")
        self._memory = memoryview(memory)

    def part(self, dtype: str, start: int, stop: int) -> memoryview:
        """Return bytes ``[start, stop)`` of the buffer of ``dtype``."""
        at = self._starts[dtype]
        return self._memory[at + start : at + stop]


def create_buffers(manifest: Manifest) -> tuple[SharedBuffers, int]:
    """Return new memory, writable and filled with zeros, and its descriptor to pass on. The caller closes the descriptor.

    Raises:
        TransportError: the system cannot provide the memory.
    """
    nbytes = _places(manifest)[1]
    fd = -1
    try:
        fd = _seal(nbytes)
        return SharedBuffers(manifest, mmap.mmap(fd, nbytes)), fd
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise TransportError(f"{nbytes} bytes of shared memory cannot be allocated: {error.strerror or error}") from error


def attach(fd: int) -> mmap.mmap:
    """Map memory that another rank created, for reading.

    Raises:
        ProtocolError: ``fd`` is no sealed shared memory, or its memory may shrink while it is read.
    """
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("shared memory that may shrink")
        return mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise ProtocolError(f"no shared memory: {error}") from error


def write_manifest(manifest: Manifest) -> int:
    """Return a descriptor of memory that holds ``manifest``, which might be too long for a message."""
    text = json.dumps(manifest.to_record()).encode()
    fd = _seal(len(text))
    with mmap.mmap(fd, len(text)) as memory:
        memory[:] = text
    return fd


def read_manifest(fd: int) -> Manifest:
    """The inverse of ``write_manifest``.

    Raises:
        ProtocolError: the memory does not hold a manifest.
    """
    try:
        with attach(fd) as memory:
            return Manifest.from_record(json.loads(memory[:]))
    except ValueError as error:
        raise ProtocolError(f"not a manifest: {error}") from error


def _seal(nbytes: int) -> int:
    """Create memory of fixed size: reading beyond the end of a file that shrank would kill the process."""
    fd = os.memfd_create("commsched", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def _places(manifest: Manifest) -> tuple[dict[str, int], int]:
    """Return the start of each dtype's buffer, and the total bytes: at least a page, since 0 bytes cannot be mapped."""
    starts, end = {}, 0
    for dtype, nbytes in manifest.buffer_bytes.items():
        starts[dtype] = end
        end += -(-nbytes // _PAGE) * _PAGE
    return starts, max(end, _PAGE)
