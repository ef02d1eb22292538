"""The ranks of a host exchange small messages of one size over a Unix socket, and pass the memory that they share over that
socket.

The memory is a second copy of each group's flat buffers, which the other ranks can read. It is anonymous (``memfd``): it has no
name that could be guessed or left behind, and is freed with the last process that holds it."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import mmap
import os
import socket
from array import array
from contextlib import suppress
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from ...core.device import Device
from ...core.errors import ProtocolError, TransportError, UnsupportedError
from ...core.manifest import ITEMSIZE, Manifest
from ...core.task import CommTask

log = logging.getLogger("commsched")

_DTYPES = tuple(ITEMSIZE)
_STRUCT = Struct("<BBxxIIIQQQ")

#: The dtype of a host's sum by the gradients' dtype. A sum that is still to be added to others is not rounded to 16 bits.
WIDER = {"float16": "float32", "bfloat16": "float32"}

#: The errors of a send whose other end has ended.
GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)

#: Space for the one descriptor of memory that may come with a message.
_FDS_BYTES = socket.CMSG_LEN(array("i").itemsize)


class Kind(IntEnum):
    """The kind of a message. The comments give the fields that count."""

    HELLO = 1  # rank: a member to its leader, once
    GROUP = 2  # group: a member adds it; comes with its manifest
    MEMORY = 3  # group: where the sender's contributions, or a leader's averages, will be
    PUSH = 4  # all but rank: a contribution is in memory
    DONE = 5  # all but rank: an average is in memory
    GOODBYE = 6  # the connection ends in good order
    RELEASED = 7  # group: a member pushes nothing more to it, and has all its averages


class LocalMessage(NamedTuple):
    """One message. ``start`` and ``stop`` are byte offsets in the group's buffer of ``dtype``."""

    kind: Kind
    rank: int = 0
    group: int = 0
    step: int = 0
    partition: int = 0
    dtype: str = _DTYPES[0]
    start: int = 0
    stop: int = 0


def about(kind: Kind, task: CommTask) -> LocalMessage:
    at = task.partition
    return LocalMessage(kind, 0, task.group, task.step, at.index, at.dtype, at.start, at.stop)


class UnixConnection:
    """One end of a connection within the host. ``send`` is thread-safe: a message is sent whole or not at all."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: LocalMessage, fds: tuple[int, ...] = (), *, wait: bool = True) -> None:
        """Send ``message``, with descriptors of memory. With ``wait``, it may block while the other end has hundreds of
        messages to read.

        Raises:
            OSError: the connection has ended, or there is no room and ``wait`` is False.
        """
        kind, rank, group, step, partition, dtype, start, stop = message
        data = _STRUCT.pack(kind, _DTYPES.index(dtype), rank, group, partition, step, start, stop)
        flags = socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
        # Not ``socket.send_fds`` and ``recv_fds``, some of which ignore the flags.
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        self._connection.sendmsg([data], passed, flags)

    def tell(self, message: LocalMessage, fds: tuple[int, ...] = ()) -> None:
        """Send ``message`` unless the other end is gone, which the thread that receives from it reports.

        Raises:
            TransportError: the system cannot send it.
        """
        try:
            self.send(message, fds)
        except OSError as error:
            if error.errno not in GONE:
                raise TransportError(f"{message.kind.name} cannot be sent: {error.strerror or error}") from error

    def receive(self) -> tuple[LocalMessage, tuple[int, ...]] | None:
        """Return the next message and the descriptors that came with it, or None at the end. The caller closes them.

        Raises:
            ProtocolError: this is no message between ranks of a host.
            TransportError: this process has no descriptor left for one that came with the message.
            TimeoutError: see ``limit``.
        """
        try:
            data, passed, flags, _ = self._connection.recvmsg(_STRUCT.size + 1, _FDS_BYTES, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise
        except OSError:  # a reset is an end too
            return None
        fds = _descriptors(passed)
        if not data:
            close_all(fds)
            return None
        try:
            if len(data) == _STRUCT.size and flags & socket.MSG_CTRUNC and not fds:
                raise TransportError("a message came without its descriptor: this process has too many open files (ulimit -n)")
            if len(data) != _STRUCT.size or flags & socket.MSG_CTRUNC:
                raise ProtocolError(f"a message of {len(data)} bytes with {len(fds)} descriptors")
            kind, dtype, rank, group, partition, step, start, stop = _STRUCT.unpack(data)
            return LocalMessage(Kind(kind), rank, group, step, partition, _DTYPES[dtype], start, stop), fds
        except TransportError:
            close_all(fds)
            raise
        except (ProtocolError, ValueError, IndexError) as error:
            close_all(fds)
            raise ProtocolError(f"not a message of this host's ranks: {error}") from error

    @property
    def has_more(self) -> bool:
        """Whether ``receive`` would return at once."""
        try:
            self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a reset is an end
        return True

    def limit(self, seconds: float | None) -> None:
        """Set the time limit of ``receive``. ``None`` means no limit."""
        self._connection.settimeout(seconds)

    def end(self) -> None:
        """End the connection for both ends: all waits end, and sent messages still arrive. Idempotent. Thread-safe."""
        with suppress(OSError):  # it has ended by itself
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket. Call it when no thread of this process uses the socket any more."""
        self._connection.close()


def _descriptors(passed: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    fds = array("i")
    for level, kind, data in passed:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return tuple(fds)


def close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


_PAGE = mmap.PAGESIZE


#: Smaller memory is not pinned for a device. To copy it once more takes less time than to pin it, and most small groups have
#: few steps: a broadcast or an average of a number has one.
PINNED_FROM_BYTES = 1 << 20


class SharedBuffers:
    """The flat buffers of a group in shared memory, each beginning on a page.

    The memory is unmapped when the last view of it is gone.
    """

    def __init__(self, manifest: Manifest, memory: mmap.mmap) -> None:
        self._starts, nbytes = _places(manifest)
        if len(memory) != nbytes:
            raise ProtocolError(f"{len(memory)} bytes of memory for a group that needs {nbytes}")
        self._memory = memoryview(memory)
        self._manifest = manifest

    def pin(self, device: Device, rank: int) -> bool:
        """Let ``device`` copy from and to the parts that :meth:`part` returns from now on. The memory is pinned until the last
        of them is gone. False if it is small, or the system does not pin it, which is logged for ``rank``."""
        if len(self._memory) < PINNED_FROM_BYTES:
            return False
        try:
            self._memory = device.pin(self._memory)
        except UnsupportedError as error:
            log.warning("rank %d copies gradients once more on their way from and to %s: %s", rank, device.name, str(error))
            return False
        return True

    @property
    def parts(self) -> dict[str, memoryview]:
        """The buffers, by dtype."""
        return {dtype: self.part(dtype, 0, nbytes) for dtype, nbytes in self._manifest.buffer_bytes.items()}

    def part(self, dtype: str, start: int, stop: int) -> memoryview:
        """Return bytes ``[start, stop)`` of the buffer of ``dtype``."""
        at = self._starts[dtype]
        return self._memory[at + start : at + stop]


def create_buffers(manifest: Manifest, rank: int) -> tuple[SharedBuffers, int]:
    """Return new memory of ``rank``, writable and filled with zeros, and its descriptor to pass on, which the caller closes.

    Raises:
        TransportError: the system cannot provide the memory.
    """
    nbytes = _places(manifest)[1]
    fd = -1
    try:
        fd = _seal(nbytes)
        return SharedBuffers(manifest, mmap.mmap(fd, nbytes)), fd
    except OSError as error:
        raise _not_allocated(fd, nbytes, rank, error) from error


def attach(fd: int, writable: bool = False) -> mmap.mmap:
    """Map memory that another rank created, for reading. Memory to be pinned must be ``writable``.

    Raises:
        ProtocolError: ``fd`` is no sealed shared memory, or its memory may shrink while it is read.
        TransportError: this process has no descriptor or memory left.
    """
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("shared memory that may shrink")
        return mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise TransportError(f"shared memory cannot be mapped: {error.strerror}") from error
        raise ProtocolError(f"no shared memory: {error}") from error


def write_manifest(manifest: Manifest, rank: int) -> int:
    """Return a descriptor of memory of ``rank`` that holds ``manifest``, which might be too long for a message.

    Raises:
        TransportError: the system cannot provide the memory.
    """
    text = json.dumps(manifest.to_record()).encode()
    fd = -1
    try:
        fd = _seal(len(text))
        with mmap.mmap(fd, len(text)) as memory:
            memory[:] = text
        return fd
    except OSError as error:
        raise _not_allocated(fd, len(text), rank, error) from error


def _not_allocated(fd: int, nbytes: int, rank: int, error: OSError) -> TransportError:
    if fd >= 0:
        os.close(fd)
    return TransportError(
        f"rank {rank}: {nbytes} bytes of shared memory cannot be allocated: {error.strerror or error}", rank=rank
    )


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
