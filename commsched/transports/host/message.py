"""What the ranks of a host say to each other: small messages of one size, over a socket of the host that can pass memory."""

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

#: Room for the one descriptor of memory that may come with a message.
_FDS_BYTES = socket.CMSG_LEN(array("i").itemsize)


class Kind(IntEnum):
    """What a message is about, and which of its fields count."""

    HELLO = 1  # rank: a member to its leader, once
    GROUP = 2  # group: a member adds it; comes with its manifest
    MEMORY = 3  # group: where the sender's contributions, or a leader's averages, will be
    PUSH = 4  # all but rank: a contribution is in memory
    DONE = 5  # all but rank: an average is in memory
    GOODBYE = 6  # the connection ends in good order


class Message(NamedTuple):
    """``start`` and ``stop`` are bytes of the group's buffer of ``dtype``."""

    kind: Kind
    rank: int = 0
    group: int = 0
    step: int = 0
    partition: int = 0
    dtype: str = _DTYPES[0]
    start: int = 0
    stop: int = 0


def about(kind: Kind, task: CommTask) -> Message:
    """Of the partition of ``task``."""
    at = task.partition
    return Message(kind, 0, task.group, task.step, at.index, at.dtype, at.start, at.stop)


class Link:
    """One end of a connection within the host. ``send`` may be called from any thread: a message goes whole or not at all."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: Message, fds: tuple[int, ...] = (), *, wait: bool = True) -> None:
        """Send ``message``, with descriptors of memory. May wait while the other end has hundreds of messages to read.

        Raises:
            OSError: the connection is over, or without ``wait``, there is no room.
        """
        kind, rank, group, step, partition, dtype, start, stop = message
        data = _STRUCT.pack(kind, _DTYPES.index(dtype), rank, group, partition, step, start, stop)
        flags = socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
        # Not ``socket.send_fds`` and ``recv_fds``, some of which ignore the flags.
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        self._connection.sendmsg([data], passed, flags)

    def receive(self) -> tuple[Message, tuple[int, ...]] | None:
        """The next message, and the memory that came with it, which is the caller's to close; None at the end.

        Raises:
            ProtocolError: it is not one of ours.
            TimeoutError: see ``limit``.
        """
        try:
            data, passed, flags, _ = self._connection.recvmsg(_STRUCT.size + 1, _FDS_BYTES, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise
        except OSError:  # reset: the end as well
            return None
        fds = _descriptors(passed)
        if not data:
            close_all(fds)
            return None
        try:
            if len(data) != _STRUCT.size or flags & socket.MSG_CTRUNC:
                raise ProtocolError(f"a message of {len(data)} bytes with {len(fds)} descriptors")
            kind, dtype, rank, group, partition, step, start, stop = _STRUCT.unpack(data)
            return Message(Kind(kind), rank, group, step, partition, _DTYPES[dtype], start, stop), fds
        except (ProtocolError, ValueError, IndexError) as error:
            close_all(fds)
            raise ProtocolError(f"not a message of this host's ranks: {error}") from error

    def limit(self, seconds: float | None) -> None:
        """How long ``receive`` may wait; None: for ever."""
        self._connection.settimeout(seconds)

    def end(self) -> None:
        """Both ends see the end, and nobody waits any more; what was sent still arrives. Idempotent; any thread."""
        with suppress(OSError):  # it has ended by itself
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give back the socket. When no thread of this process uses it any more."""
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
