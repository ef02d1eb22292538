"""Messages between the ranks of a host: small, of one size, over a Unix socket that can pass memory."""

from __future__ import annotations

import os
import socket
from array import array
from contextlib import suppress
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from ...core.errors import ProtocolError
from ...core.manifest import ITEMSIZE
from ...core.task import CommTask

_DTYPES = tuple(ITEMSIZE)
_STRUCT = Struct("<BBxxIIIQQQ")

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
    """Return a message about the partition of ``task``."""
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

    def receive(self) -> tuple[LocalMessage, tuple[int, ...]] | None:
        """Return the next message and the descriptors that came with it, or None at the end. The caller closes them.

        Raises:
            ProtocolError: this is no message between ranks of a host.
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
            if len(data) != _STRUCT.size or flags & socket.MSG_CTRUNC:
                raise ProtocolError(f"a message of {len(data)} bytes with {len(fds)} descriptors")
            kind, dtype, rank, group, partition, step, start, stop = _STRUCT.unpack(data)
            return LocalMessage(Kind(kind), rank, group, step, partition, _DTYPES[dtype], start, stop), fds
        except (ProtocolError, ValueError, IndexError) as error:
            close_all(fds)
            raise ProtocolError(f"not a message of this host's ranks: {error}") from error

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
