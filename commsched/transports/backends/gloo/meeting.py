"""How gloo's process groups find each other: the store through which they do, and gloo's listening socket, which accepts no
stranger once they have. Only torch holds that socket, and it accepts every connection for as long as the process lives."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from ....core.errors import TransportError


class GatherStore(Store):
    """A PyTorch store that gathers over the control channel, so that no further port is open to strangers.

    A rank's values are sent when the rank asks for a key that it does not have. All ranks must do so equally often. Process
    groups do: each sets its address, then asks for all addresses.

    An address ends with a number of 8 bytes for each of ``world_size`` ranks, usually the same numbers on all ranks. They are
    gathered apart from the rest, because rank 0 sends equal values once: else it would send the cube of the ranks.
    """

    def __init__(self, gather: Callable[[Any], list[Any]], world_size: int) -> None:
        super().__init__()
        self._gather = gather
        self._numbers = 8 * world_size
        self._own: dict[str, str] = {}
        self._all: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self._own[key] = (value.encode() if isinstance(value, str) else value).hex()

    @property
    def published(self) -> bytes:
        """All values that this rank has set, separated by spaces."""
        return b" ".join(bytes.fromhex(value) for value in self._own.values())

    def get(self, key: str) -> bytes:
        """Return the value that a rank has set for ``key``.

        Raises:
            TransportError: no rank had set it when all ranks asked.
            CommschedError: the job failed meanwhile.
        """
        self.wait([key])
        return self._all[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all ``keys`` are there. Raises as ``get`` does. The control channel, not ``timeout``, limits the wait."""
        if all(key in self._all for key in keys):
            return
        beginnings = self._gather({key: value[: -2 * self._numbers] for key, value in self._own.items()})
        ends = self._gather([value[-2 * self._numbers :] for value in self._own.values()])
        for record, rest in zip(beginnings, ends, strict=True):
            self._all.update((key, bytes.fromhex(value + end)) for (key, value), end in zip(record.items(), rest, strict=True))
        missing = [key for key in keys if key not in self._all]
        if missing:
            raise TransportError(f"gloo asks for {missing[0]!r}, which no rank has set: is it the same version everywhere?")


log = logging.getLogger("commsched")

T = TypeVar("T")

#: Linux constants for which Python has no names: the state of a listening socket, SO_ATTACH_FILTER, and the one instruction of
#: a filter that drops every packet.
_LISTENS = "0A"
_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = b"\x06\x00\x00\x00\x00\x00\x00\x00"


class ListeningSocket(Generic[T]):
    """The sockets that ``make`` opened to listen. ``made`` is the value that ``make`` returned.

    gloo accepts every connection and keeps it open, but needs no more connections once all ranks are connected. If the socket
    were shut down, gloo's thread would spin. So packets to the socket are dropped instead, and later connections get no answer.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        before = _listening()
        self.made = make()
        # Other threads may have opened listening sockets meanwhile. ``ignore_strangers`` leaves those alone.
        self._sockets: list[socket.socket] = []
        for inode, descriptor in _listening().items():
            if inode not in before:
                with suppress(OSError):  # another thread's socket, closed by now
                    self._sockets.append(socket.socket(fileno=os.dup(descriptor)))

    def ignore_strangers(self, published: bytes) -> None:
        """Refuse new connections. ``published`` holds the address by which the other ranks found the socket, in gloo's form."""
        for each in self._sockets:
            if _as_gloo_writes(each) not in published:
                continue
            filters = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
            try:
                each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(_Program(1, ctypes.addressof(filters))))
            except OSError as error:
                log.debug("gloo still accepts connections at %s: %s", each.getsockname(), error)

    def close(self) -> None:
        """Close our duplicates of the sockets; gloo keeps its own. Idempotent."""
        for each in self._sockets:
            each.close()
        self._sockets = []


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.c_void_p))


def _listening() -> dict[int, int]:
    """Return the descriptors of this process's listening TCP sockets, by inode."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # for example without IPv6
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS:
                    inodes.add(int(fields[9]))
    found = {}
    with suppress(OSError):  # there is no /proc
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed by now
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{name}"))
                if match and int(match[1]) in inodes:
                    found[int(match[1])] = int(name)
    return found


def _as_gloo_writes(listening: socket.socket) -> bytes:
    """Return the beginning of the ``struct sockaddr`` of ``listening``, which gloo publishes."""
    where: tuple[str, int] = listening.getsockname()[:2]
    host, port = where
    flow = b"" if listening.family == socket.AF_INET else bytes(4)
    return struct.pack("=H", listening.family) + port.to_bytes(2, "big") + flow + socket.inet_pton(listening.family, host)
