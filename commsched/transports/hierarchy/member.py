"""The two ends between a member and the leader of its host: MemberTransport, which takes its averages from the leader, and the
leader's connection to one member."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np

from ...core.device import Device
from ...core.errors import ClosedError, CommschedError, PeerLost, ProtocolError, TransportError, error_text
from ...core.interfaces import Completion, OnFailure, Transport
from ...core.manifest import Manifest
from ...core.task import CommTask
from ..averaging.contributions import Complete, Contributions, PartitionKey
from ..backend import TransportContext
from .messages import (
    GONE,
    WIDER,
    Kind,
    LocalMessage,
    SharedBuffers,
    UnixConnection,
    about,
    attach,
    close_all,
    create_buffers,
    read_manifest,
    write_manifest,
)


class MemberTransport(Transport):
    """Writes contributions to memory that the leader reads, and reads averages from memory that the leader writes.

    See ``interfaces.Transport``. Each range of a group has its own place in both memories, which is written again only a step
    later. A member writes its next contribution after it has read the average. The leader writes the next average after every
    member's next contribution has come. So no memory is read while it is written. Each side unmaps the memory that it no longer
    needs, and the memory is freed when both sides have.

    A group whose gradients lie on a device is copied from and to both memories by the device itself, if they can be pinned.

    ``leave`` does nothing here: the leader is notified of each rank of its host that leaves, and knows which tasks wait for it.

    Args:
        context: the arguments of a rank of the job. A leader that is lost or breaks the protocol is reported to ``on_failure``.
        link: the socket to the leader; closed with the transport.
        leader: the leader's rank.
        leaders, channels, norm_rows, servers: the values of the leader's transport.
    """

    one_per_host = True

    def __init__(
        self,
        context: TransportContext,
        link: UnixConnection,
        leader: int,
        leaders: tuple[int, ...],
        channels: int,
        norm_rows: int,
        servers: int,
    ) -> None:
        self.rank = context.world.rank
        self.world_size = context.world.world_size
        self.ordered = bool(leaders)
        self.leaders = leaders
        self.channels = channels
        self.servers = servers
        self._norm_rows = norm_rows
        self._link = link
        self._leading = leader
        self._leader = f"rank {leader}, which leads this host,"
        self._on_failure = context.on_failure
        self._closed = False
        self._said_goodbye = False
        self._manifests: dict[int, Manifest] = {}
        self._released: deque[int] = deque()  # groups of which the leader is to be told that they are released
        self._contributions: dict[int, SharedBuffers] = {}  # by group; the dispatcher adds them
        self._averages: dict[int, SharedBuffers] = {}  # by group; the reader adds them
        self._devices: dict[int, Device] = {}  # by group whose contributions are pinned
        self._unsent: dict[int, int] = {}  # by such a group that is not added yet: the descriptor of the memory
        self._in_place: set[int] = set()  # groups whose averages are pinned
        # Single operations on a dict are atomic; the dispatcher adds a key, and the reader removes it.
        self._pending: dict[PartitionKey, tuple[CommTask, Completion]] = {}
        self._reader = threading.Thread(target=self._read, name=f"commsched-host-{self.rank}", daemon=True)
        self._reader.start()
        context.when_failed(lambda error: link.end())  # ends the waits for the leader

    # --- interfaces.Transport ---

    def add_group(self, group: int, manifest: Manifest) -> None:
        self._manifests[group] = manifest
        while self._released:
            self._send(LocalMessage(Kind.RELEASED, group=self._released.popleft()))
        self._pass(LocalMessage(Kind.GROUP, group=group), write_manifest(manifest, self.rank))
        if group in self._unsent:
            self._pass(LocalMessage(Kind.MEMORY, group=group), self._unsent.pop(group))

    def mirror(self, group: int, manifest: Manifest, device: Device) -> Mapping[str, memoryview] | None:
        """See ``interfaces.Transport``. The leader reads what the device copies there."""
        if self._closed:
            raise ClosedError("this transport is closed")
        contributions, fd = create_buffers(manifest, self.rank)
        if not contributions.pin(device, self.rank):
            os.close(fd)
            return None
        self._devices[group] = device
        self._contributions[group], self._unsent[group] = contributions, fd
        return contributions.parts

    def norm_rows(self, manifest: Manifest) -> int:
        """See ``LeaderTransport``."""
        return 0 if any(spec.dtype in WIDER for spec in manifest.tensors) else self._norm_rows

    def start(self, task: CommTask, completion: Completion) -> None:
        """See ``interfaces.Transport``. If the contribution is not in the shared memory, copies it there before it returns."""
        if self._closed:
            raise ClosedError("this transport is closed")
        at = task.partition
        contribution = self._contribution(task.group).part(at.dtype, at.start, at.stop)
        if task.data.obj is not contribution.obj:
            np.copyto(np.frombuffer(contribution, np.uint8), np.frombuffer(task.data, np.uint8))
        self._pending[PartitionKey(task.group, task.step, at.index)] = (task, completion)
        completion.on_sent(task)
        self._send(about(Kind.PUSH, task))

    def release(self, group: int) -> None:
        """See ``interfaces.Transport``. The leader learns of it with the next group."""
        if group in self._manifests:
            self._released.append(group)
        for of in (self._manifests, self._contributions, self._averages, self._devices):
            of.pop(group, None)
        self._in_place.discard(group)

    def close(self, graceful: bool = True) -> None:
        if not self._closed and graceful:
            with suppress(OSError):
                self._link.send(LocalMessage(Kind.GOODBYE), wait=False)
        self._closed = True
        self._link.end()
        self._reader.join()
        self._link.close()
        close_all(tuple(self._unsent.values()))
        self._unsent.clear()
        self._pending.clear()
        self._contributions.clear()
        self._averages.clear()

    # --- the dispatcher's thread ---

    def _contribution(self, group: int) -> SharedBuffers:
        mirror = self._contributions.get(group)
        if mirror is None:
            mirror, fd = create_buffers(self._manifests[group], self.rank)
            self._contributions[group] = mirror
            self._pass(LocalMessage(Kind.MEMORY, group=group), fd)
        return mirror

    def _pass(self, message: LocalMessage, fd: int) -> None:
        try:
            self._send(message, (fd,))
        finally:
            os.close(fd)

    def _send(self, message: LocalMessage, fds: tuple[int, ...] = ()) -> None:
        try:
            self._link.send(message, fds)
        except OSError as error:
            if error.errno in GONE:
                raise PeerLost(f"{self._leader} is gone: {error.strerror or error}", rank=self._leading) from error
            what = f"{message.kind.name} to {self._leader}"
            raise TransportError(f"rank {self.rank} cannot send {what} {error.strerror or error}", rank=self.rank) from error

    # --- the reader's thread ---

    def _read(self) -> None:
        try:
            while (received := self._link.receive()) is not None:
                self._handle(*received)
            if not self._said_goodbye:
                raise PeerLost(f"{self._leader} is gone: it ended the connection without a goodbye", rank=self._leading)
        except CommschedError as error:
            self._fail(_located(error, self.rank, f"rank {self._leading}"))
        except Exception as error:
            said = f"rank {self.rank} failed to read from rank {self._leading}: {error_text(error)}"
            self._fail(TransportError(said, rank=self.rank))

    def _handle(self, message: LocalMessage, fds: tuple[int, ...]) -> None:
        try:
            if message.kind is Kind.DONE:
                self._take(message)
            elif message.kind is Kind.MEMORY and fds and message.group in self._manifests:
                self._map_averages(message.group, fds[0])
            elif message.kind is Kind.GOODBYE:
                self._goodbye()
            else:
                raise ProtocolError(f"{self._leader} sent {message.kind.name} out of turn")
        finally:
            close_all(fds)

    def _map_averages(self, group: int, fd: int) -> None:
        device = self._devices.get(group)
        averages = SharedBuffers(self._manifests[group], attach(fd, writable=device is not None))
        if device is not None and averages.pin(device, self.rank):
            self._in_place.add(group)
        self._averages[group] = averages

    def _take(self, message: LocalMessage) -> None:
        """Let the task's data have or, if its device can copy it from there, be the average, and complete the task."""
        started = self._pending.pop(PartitionKey(message.group, message.step, message.partition), None)
        if started is None or message != about(Kind.DONE, started[0]):
            raise ProtocolError(
                f"{self._leader} sent an average of step {message.step}, partition {message.partition}, not asked for"
            )
        task, completion = started
        mirror = self._averages.get(task.group)
        if mirror is None:
            raise ProtocolError(f"{self._leader} sent an average of group {task.group} without its memory")
        average = mirror.part(message.dtype, message.start, message.stop)
        if task.group in self._in_place:
            task.data = average
        else:
            np.copyto(np.frombuffer(task.data, np.uint8), np.frombuffer(average, np.uint8))
        del mirror, average  # the group may be released as soon as the task is done
        completion.on_done(task)

    def _goodbye(self) -> None:
        self._said_goodbye = True
        waiting = next(iter(list(self._pending.values())), None)
        if waiting is not None:
            raise PeerLost(f"{self._leader} closed while {self._describe(waiting[0])} waits for it")

    def _describe(self, task: CommTask) -> str:
        at = task.partition
        return f"tensor {self._manifests[task.group].names_in(at.dtype, at.start, at.stop)} of step {task.step}"

    def _fail(self, error: CommschedError) -> None:
        if not self._closed:
            self._on_failure(error)


def _located(error: CommschedError, rank: int, sender: str) -> CommschedError:
    """``error`` with both ends in its text, if this process lacked something to receive a message and its memory."""
    if type(error) is not TransportError or error.rank is not None:
        return error
    return TransportError(f"rank {rank} cannot receive from {sender}: {error}", rank=rank)


#: The most messages of a member that are read before the leader reports what they complete. A report costs a message to rank 0.
_MAX_TOGETHER = 16


class Connection:
    """Handles the messages of the member ``rank``, in a thread of its own, and maps the member's memory.

    Args:
        leader: this rank.
        rank: the member's rank.
        index: the index of ``rank`` among the ranks of the host.
        link: the socket to the member; closed with this object.
        contributions: the contributions of the host's ranks.
        gathered: called with the key and the result of each push.
        report: called behind pushes that came together.
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
        report: Callable[[], None],
        fail: OnFailure,
    ) -> None:
        self.link = link
        self._leader = leader
        self._rank = rank
        self._index = index
        self._contributions = contributions
        self._gathered = gathered
        self._report = report
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

    def tell(self, message: LocalMessage, fds: tuple[int, ...] = ()) -> None:
        """Send ``message`` to the member, unless that is gone. Raises TransportError if the system cannot send it."""
        try:
            self.link.tell(message, fds)
        except TransportError as error:
            what = f"group {message.group}"
            if message.kind is Kind.DONE:
                what = f"step {message.step}, partition {message.partition} of {what}"
            raise TransportError(f"rank {self._leader} to rank {self._rank}, {what}: {error}", rank=self._leader) from error

    def close(self) -> None:
        self.link.end()
        if self._reader.ident is not None:  # the thread has begun
            self._reader.join()
        self.link.close()
        self._mirrors.clear()

    # --- the reader's thread ---

    def _read(self) -> None:
        try:
            unreported = 0
            while (received := self.link.receive()) is not None:
                self._handle(*received)
                unreported += 1
                if unreported == _MAX_TOGETHER or not self.link.has_more:
                    self._report()
                    unreported = 0
            if not self._said_goodbye:
                said = f"rank {self._rank} is gone: it ended its connection to rank {self._leader} without a goodbye"
                raise PeerLost(said, rank=self._rank)
        except CommschedError as error:
            self._fail(_located(error, self._leader, f"rank {self._rank}"))
        except Exception as error:
            said = f"rank {self._leader} failed to serve rank {self._rank}: {error_text(error)}"
            self._fail(TransportError(said, rank=self._leader))

    def _handle(self, message: LocalMessage, fds: tuple[int, ...]) -> None:
        try:
            if message.kind is Kind.PUSH:
                self._push(message)
            elif message.kind is Kind.GROUP and fds:
                manifest = self._manifests[message.group] = read_manifest(fds[0])
                self._contributions.add_group(self._index, message.group, manifest)
            elif message.kind is Kind.MEMORY and fds and message.group in self._manifests:
                self._mirrors[message.group] = SharedBuffers(self._manifests[message.group], attach(fds[0]))
            elif message.kind is Kind.RELEASED:
                self._contributions.release(self._index, (message.group,))
                self.release(message.group)  # the leader may have released it before the member announced it
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
            try:
                self.tell(message._replace(kind=Kind.DONE))
            except TransportError as error:  # whoever made the average goes on with those of other ranks
                self._fail(error)

        self._gathered(key, self._contributions.push(self._index, key, *at, mirror.part(*at), reply))
