"""Memory that the ranks of a host share: each group's flat buffers once more, where the others can read them.

It is anonymous (``memfd``) and passed over a socket, so it has no name that anybody could guess or that could be left behind:
it ends with the last process that has it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os

from ...core.errors import ProtocolError, TransportError
from ...core.manifest import Manifest

_PAGE = mmap.PAGESIZE


class Mirror:
    """The flat buffers of a group in shared memory, each beginning on a page.

    It is unmapped when the last view of it is gone.
    """

    def __init__(self, manifest: Manifest, memory: mmap.mmap) -> None:
        self._starts, nbytes = _places(manifest)
        if len(memory) != nbytes:
            raise ProtocolError(f"{len(memory)} bytes of memory for a group that needs {nbytes}")
        self._memory = memoryview(memory)

    def part(self, dtype: str, start: int, stop: int) -> memoryview:
        """Bytes ``[start, stop)`` of the buffer of ``dtype``."""
        at = self._starts[dtype]
        return self._memory[at + start : at + stop]


def create(manifest: Manifest) -> tuple[Mirror, int]:
    """New memory, zeros at first, writable here; and the descriptor to pass on, which is the caller's to close.

    Raises:
        TransportError: the system has none.
    """
    nbytes = _places(manifest)[1]
    fd = -1
    try:
        fd = _seal(nbytes)
        return Mirror(manifest, mmap.mmap(fd, nbytes)), fd
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise TransportError(f"{nbytes} bytes of shared memory cannot be had: {error.strerror or error}") from error


def attach(fd: int) -> mmap.mmap:
    """Memory that another rank made, to be read.

    Raises:
        ProtocolError: it is no memory of the kind, or could be taken away while it is read.
    """
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("shared memory that may shrink")
        return mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise ProtocolError(f"no shared memory: {error}") from error


def write_manifest(manifest: Manifest) -> int:
    """A descriptor of memory that holds ``manifest``: as a message it might be too long."""
    text = json.dumps(manifest.to_record()).encode()
    fd = _seal(len(text))
    with mmap.mmap(fd, len(text)) as memory:
        memory[:] = text
    return fd


def read_manifest(fd: int) -> Manifest:
    """The inverse of ``write_manifest``.

    Raises:
        ProtocolError: it is not what that makes.
    """
    try:
        with attach(fd) as memory:
            return Manifest.from_record(json.loads(memory[:]))
    except ValueError as error:
        raise ProtocolError(f"not a manifest: {error}") from error


def _seal(nbytes: int) -> int:
    """New memory whose size stays: reading beyond the end of a file that shrank would end the process."""
    fd = os.memfd_create("commsched", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def _places(manifest: Manifest) -> tuple[dict[str, int], int]:
    """Where each dtype's buffer begins, and how much memory there is: at least a page, as none cannot be mapped."""
    starts, end = {}, 0
    for dtype, nbytes in manifest.buffer_bytes.items():
        starts[dtype] = end
        end += -(-nbytes // _PAGE) * _PAGE
    return starts, max(end, _PAGE)
