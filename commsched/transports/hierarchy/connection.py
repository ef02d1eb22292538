"""The leader's connection to one member."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from ...core.errors import CommschedError, PeerLost, ProtocolError, TransportError
from ...core.interfaces import OnFailure
from ...core.manifest import Manifest
from ..averaging.contributions import Complete, Contributions, PartitionKey
from .messages import Kind, LocalMessage, SharedBuffers, UnixConnection, attach, close_all, read_manifest


class Connection:
    """Handles the messages of the member ``rank``, in a thread of its own, and maps the member's memory.

    Args:
        leader: this rank.
        rank: the member's rank.
        index: the index of ``rank`` among the ranks of the host.
        link: the socket to the member; closed with this object.
        contributions: the contributions of the host's ranks.
        gathered: called with the key and the result of each push.
        fail: called when the member is lost or breaks the protocol.
    """

    def __init__(
        self,
        leader: int,
        rank: int,
        index: int,
        link: UnixConnection,
        contributions: Contributions,
        gathered: Callable[[PartitionKey, Complete | None], None],
        fail: OnFailure,
    ) -> None:
        self.link = link
        self._leader = leader
        self._rank = rank
        self._index = index
        self._contributions = contributions
        self._gathered = gathered
        self._fail = fail
        self._said_goodbye = False
        self._manifests: dict[int, Manifest] = {}
        self._mirrors: dict[int, SharedBuffers] = {}  # by group
        self._reader = threading.Thread(target=self._read, name=f"commsched-host-{leader}-{rank}", daemon=True)

    def begin(self) -> None:
        self._reader.start()

    def release(self, group: int) -> None:
        """Drop the memory of ``group``: all contributions of the member to it are summed, and not read again."""
        self._manifests.pop(group, None)
        self._mirrors.pop(group, None)

    def close(self) -> None:
        self.link.end()
        if self._reader.ident is not None:  # the thread has begun
            self._reader.join()
        self.link.close()
        self._mirrors.clear()

    # --- the reader's thread ---

    def _read(self) -> None:
        try:
            while (received := self.link.receive()) is not None:
                self._handle(*received)
            if not self._said_goodbye:
                raise PeerLost(f"rank {self._rank} is gone: it ended its connection to rank {self._leader} without a goodbye")
        except CommschedError as error:
            self._fail(error)
        except Exception as error:
            self._fail(
                TransportError(f"rank {self._leader} failed to serve rank {self._rank}: {type(error).__name__}: {error}")
            )

    def _handle(self, message: LocalMessage, fds: tuple[int, ...]) -> None:
        try:
            if message.kind is Kind.PUSH:
                self._push(message)
            elif message.kind is Kind.GROUP and fds:
                manifest = self._manifests[message.group] = read_manifest(fds[0])
                self._contributions.add_group(self._index, message.group, manifest)
            elif message.kind is Kind.MEMORY and fds and message.group in self._manifests:
                self._mirrors[message.group] = SharedBuffers(self._manifests[message.group], attach(fds[0]))
            elif message.kind is Kind.GOODBYE:
                self._said_goodbye = True
                self._contributions.leave(self._index)
            else:
                raise ProtocolError(f"rank {self._rank} sent {message.kind.name} out of turn")
        finally:
            close_all(fds)

    def _push(self, message: LocalMessage) -> None:
        key = PartitionKey(message.group, message.step, message.partition)
        at = (message.dtype, message.start, message.stop)
        self._contributions.require_fitting(self._index, key, *at)
        mirror = self._mirrors.get(message.group)
        if mirror is None:
            raise ProtocolError(f"rank {self._rank} pushed step {message.step} of group {message.group} without its memory")

        def reply(result: memoryview) -> None:
            with suppress(OSError):  # the member is gone, which this thread reports
                self.link.send(message._replace(kind=Kind.DONE))

        self._gathered(key, self._contributions.push(self._index, key, *at, mirror.part(*at), reply))
