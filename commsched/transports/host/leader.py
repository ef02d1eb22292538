"""LeaderTransport: the rank that stands for all ranks of its host."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ...core.errors import ClosedError, CommschedError, TransportError
from ...core.manifest import ITEMSIZE, Manifest
from ...core.ports import Completion, OnFailure, Transport
from ...core.task import ALL_REDUCE, CommTask
from ..buffers import BufferPool
from ..contributions import Complete, Contributions, Key
from ..recast import Recast
from ..reduce import average, narrow, total, widen
from .connection import Connection
from .launches import Launches
from .layout import Layout
from .member import WhenFailed
from .memory import Mirror, create
from .message import Kind, Link, Message

log = logging.getLogger("commsched")

#: Sums of several ranks, still to be added to others, are not rounded to 16 bits.
_WIDER = {"float16": "float32", "bfloat16": "float32"}


@dataclass(slots=True, eq=False)
class _Started:
    """A task of this rank, and once it has come from all ranks of the host, their contributions."""

    task: CommTask
    completion: Completion
    complete: Complete | None = None


class LeaderTransport:
    """Sums what the ranks of its host contribute, in the order of their local ranks, has ``network`` average the sums of the
    hosts, and gives the result to each. See ``ports.Transport``.

    A sum goes to ``network`` in the order in which this rank started its task, if ``network`` is ordered; else by priority. Its
    credit is back when ``network`` has sent it, or if ``network`` is not ordered, at once: the members may be waiting for
    another task of this rank first.

    What was 16 bits goes to ``network`` as float32, so that it is rounded once; what was float32 goes as ``wire``, if that is
    given, and what a rank contributed is not rounded before its host's sum is.

    Args:
        layout: the ranks of all hosts.
        wire: ``none`` or a 16-bit type.
        links: to the members of this host, by rank; closed with the transport.
        network: averages over hosts, with the number of ranks as divisor; None: there is one host. Closed with the transport.
        on_failure: told when a member is lost or breaks the protocol, from any thread.
        when_failed: the job's; ends what waits for members.
    """

    verbs = frozenset({ALL_REDUCE})

    def __init__(
        self,
        rank: int,
        world_size: int,
        layout: Layout,
        links: Mapping[int, Link],
        network: Transport | None,
        *,
        wire: str = "none",
        on_failure: OnFailure,
        when_failed: WhenFailed,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.ordered = network is not None and network.ordered
        self.channels = network.channels if network is not None else 1
        self._layout = layout
        self._network = network
        self._on_failure = on_failure
        self._closed = False
        self._manifests: dict[int, Manifest] = {}
        self._recasts: dict[int, Recast] = {}
        self._travels = _WIDER if wire == "none" else {**_WIDER, "float32": wire}  # as what, by what it was
        self._buffers = BufferPool()  # for sums that travel as another type
        self._averages: dict[int, Mirror] = {}  # by group; the launching thread adds
        self._host = layout.hosts[layout.host_of(rank)]
        self._contributions = Contributions(self._host, on_failure)
        self._members = [
            Connection(rank, each, self._host.index(each), link, self._contributions, self._gathered, self._fail)
            for each, link in links.items()
        ]
        # Single operations on a dict are atomic; a key is added by the dispatcher and removed when its average is there.
        self._started: dict[Key, _Started] = {}
        self._work = threading.Condition()  # the launching thread waits here
        self._launches: Launches[_Started] = Launches(self.ordered, self.channels)
        self._launcher = threading.Thread(target=self._launch_all, name="commsched-host-launch", daemon=True)
        try:
            self._launcher.start()
            for member in self._members:
                member.begin()
            when_failed(lambda error: self._end_links())
        except BaseException:
            self.close(graceful=False)
            raise

    # --- ports.Transport ---

    def add_group(self, group: int, manifest: Manifest) -> None:
        """See ``ports.Transport``.

        Raises:
            ManifestMismatch: a rank of this host added other tensors.
        """
        recast = Recast(manifest, self._travels)
        self._manifests[group], self._recasts[group] = manifest, recast
        if self._network is not None:
            self._network.add_group(group, recast.manifest)
        self._contributions.add_group(0, group, manifest)

    def start(self, task: CommTask, completion: Completion) -> None:
        """See ``ports.Transport``.

        Raises:
            CommschedError: see ``Contributions.push``.
            ClosedError: after ``close``.
        """
        if self._closed:
            raise ClosedError("this transport is closed")
        key, at = Key(task.group, task.step, task.partition.index), task.partition
        self._started[key] = _Started(task, completion)
        with self._work:
            self._launches.expect(key, task.channel)
        if not self.ordered:
            completion.on_sent(task)

        def reply(result: memoryview) -> None:
            if result is not task.data:
                np.copyto(np.frombuffer(task.data, np.uint8), np.frombuffer(result, np.uint8))

        self._gathered(key, self._contributions.push(0, key, at.dtype, at.start, at.stop, task.data, reply))

    def release(self, group: int) -> None:
        """See ``ports.Transport``. Every member has pushed its last to it and was told that the average is there; what it
        still reads it has mapped itself."""
        for of in (self._manifests, self._recasts, self._averages):
            of.pop(group, None)
        for member in self._members:
            member.release(group)
        if self._network is not None:
            self._network.release(group)

    def leave(self, rank: int) -> None:
        """See ``ports.Transport``."""
        if rank in self._host:
            self._contributions.leave(self._host.index(rank))
        elif rank in self._layout.leaders and self._network is not None:
            # What its host still had to send is sent: it waited for that before it left. Of a rank that does not lead, its
            # leader knows what waits for it.
            self._network.leave(self._layout.host_of(rank))

    def close(self, graceful: bool = True) -> None:
        if graceful and not self._closed:
            for member in self._members:
                with suppress(OSError):
                    member.link.send(Message(Kind.GOODBYE), wait=False)
        with self._work:
            self._closed = True
            self._work.notify()
        self._end_links()
        if self._launcher.ident is not None:  # it has begun
            self._launcher.join()
        for member in self._members:
            member.close()
        if self._network is not None:
            self._network.close(graceful)
        self._contributions.close()
        self._started.clear()
        self._averages.clear()

    # --- any thread ---

    def _gathered(self, key: Key, complete: Complete | None) -> None:
        """If ``complete``, ``key`` has come from all ranks of the host."""
        if complete is None:
            return
        started = self._started[key]
        started.complete = complete
        with self._work:
            self._launches.add(key, started.task.order, started)
            self._work.notify()

    def _fail(self, error: CommschedError) -> None:
        if not self._closed:
            self._on_failure(error)

    def _end_links(self) -> None:
        for member in self._members:
            member.link.end()

    # --- the launching thread ---

    def _launch_all(self) -> None:
        while (started := self._next_launch()) is not None:
            try:
                self._launch(started)
            except CommschedError as error:
                self._fail(error)
            except Exception as error:
                log.exception("rank %d failed as the leader of its host", self.rank)
                self._fail(
                    TransportError(f"rank {self.rank} failed at {self._name(started.task)}: {type(error).__name__}: {error}")
                )

    def _next_launch(self) -> _Started | None:
        with self._work:
            while not self._closed:
                started = self._launches.next()
                if started is not None:
                    return started
                self._work.wait()
        return None

    def _launch(self, started: _Started) -> None:
        task, complete = started.task, started.complete
        assert complete is not None
        result = self._result(task)
        if self._network is None:
            average(complete.payloads, task.partition.dtype, result)
            complete.payloads.clear()
            self._finish(started, result)
            return
        data = self._sum(task, complete, result)
        complete.payloads.clear()
        self._network.start(self._recasts[task.group].task(task, data), _OverHosts(self, started, result))

    def _sum(self, task: CommTask, complete: Complete, result: memoryview) -> memoryview:
        """The host's sum as it travels: in ``result``, or if that is of another type, in memory of its own."""
        dtype = task.partition.dtype
        travels = self._travels.get(dtype, dtype)
        data = result if travels == dtype else self._buffers.take(task.nbytes // ITEMSIZE[dtype] * ITEMSIZE[travels])
        if dtype in _WIDER:
            total(complete.payloads, dtype, data)
            return data
        if result is not task.data:  # which is a sum by itself, of a host's only rank
            total(complete.payloads, dtype, result)
        if travels != dtype:
            narrow(result, travels, data)
        return data

    def _result(self, task: CommTask) -> memoryview:
        """Where the average is to be: where the members can read it."""
        if not self._members:
            data: memoryview = task.data
            return data
        at = task.partition
        if task.group not in self._averages:
            self._share(task.group)
        return self._averages[task.group].part(at.dtype, at.start, at.stop)

    def _share(self, group: int) -> None:
        """Make memory for averages, and let every member have it."""
        self._averages[group], fd = create(self._manifests[group])
        try:
            for member in self._members:
                with suppress(OSError):  # it is gone, which its reader tells
                    member.link.send(Message(Kind.MEMORY, group=group), (fd,))
        finally:
            os.close(fd)

    # --- the launching thread, or the network's ---

    def arrived(self, started: _Started, data: memoryview, result: memoryview) -> None:
        """``data`` holds the average over the network."""
        dtype = started.task.partition.dtype
        if dtype in _WIDER:
            narrow(data, dtype, result)
        elif data is not result:
            widen(data, self._travels[dtype], result)
        self._finish(started, result)

    def _finish(self, started: _Started, result: memoryview) -> None:
        task, complete = started.task, started.complete
        assert complete is not None
        own, *others = complete.replies
        for reply in (*others, own):  # the members' threads may begin to copy while this one does
            reply(result)
        del result, own, others
        complete.replies.clear()
        del self._started[Key(task.group, task.step, task.partition.index)]
        started.completion.on_done(task)

    def sent(self, started: _Started) -> None:
        if self.ordered:
            started.completion.on_sent(started.task)

    # --- for messages ---

    def _name(self, task: CommTask) -> str:
        at = task.partition
        return f"tensor {self._manifests[task.group].names_in(at.dtype, at.start, at.stop)} of step {task.step}"


class _OverHosts:
    """The Completion of a host's sum."""

    def __init__(self, leader: LeaderTransport, started: _Started, result: memoryview) -> None:
        self._leader = leader
        self._started = started
        self._result = result

    def on_sent(self, task: CommTask) -> None:
        self._leader.sent(self._started)

    def on_done(self, task: CommTask) -> None:
        self._leader.arrived(self._started, task.data, self._result)
