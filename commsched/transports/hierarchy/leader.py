"""LeaderTransport: the transport of the rank that stands for all ranks of its host."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ...core.device import Device
from ...core.errors import ClosedError, CommschedError, TransportError, error_text
from ...core.interfaces import Calls, Collected, Completion, Transport
from ...core.manifest import ITEMSIZE, Manifest
from ...core.task import CommTask
from ..averaging.buffer_pool import BufferPool
from ..averaging.contributions import Complete, Contributions, PartitionKey
from ..averaging.reduce import average, narrow, total, widen
from ..backend import TransportContext
from ..wire import DtypeMapping
from .launch_queue import LaunchQueue
from .member import Connection
from .messages import WIDER, Kind, LocalMessage, SharedBuffers, UnixConnection, create_buffers
from .topology import HostTopology

log = logging.getLogger("commsched")


@dataclass(slots=True, eq=False)
class _Started:
    """A task of this rank, which is collected first (``completion`` is None), or started at once. ``complete`` holds the
    contributions once all ranks of the host have contributed."""

    task: CommTask
    completion: Completion | None = None
    complete: Complete | None = None


class LeaderTransport(Transport):
    """Sums the contributions of its host's ranks, averages the hosts' sums over ``network``, and distributes the result.

    See ``interfaces.Transport``. Contributions are summed in the order of the host's ranks in ``layout``.

    If ``network`` is ordered, this rank agrees on the order with the other leaders, and speaks for its members: it reports a
    task when all of them have contributed. Sums go to ``network`` in the order in which this rank started their tasks, and a
    task's credit returns when ``network`` has sent its sum. If ``network`` is not ordered, sums go to it by priority, and a
    task's credit returns at once, because the members may be waiting for another task of this rank first.

    16-bit gradients go to ``network`` as float32, so that they are rounded only once. float32 gradients go to ``network`` as
    ``settings.wire``, if that is a dtype. Only a host's sum is rounded, never the contribution of one of its ranks.

    Args:
        context: the arguments of a rank of the job. A member that is lost or breaks the protocol is reported to ``on_failure``.
        links: the sockets to the members of this host, by rank; closed with the transport.
        network: averages over hosts, with the number of ranks as divisor. ``None`` means that there is one host. Closed with
            the transport.
    """

    one_per_host = True

    def __init__(
        self,
        context: TransportContext,
        layout: HostTopology,
        links: Mapping[int, UnixConnection],
        network: Transport | None,
    ) -> None:
        self.rank = rank = context.world.rank
        self.world_size = context.world.world_size
        if network is not None:
            self.ordered, self.channels, self.servers = network.ordered, network.channels, network.servers
        self.leaders = layout.leader_of if self.ordered else ()
        self._layout = layout
        self._network = network
        self._on_failure = context.on_failure
        self._closed = False
        self._manifests: dict[int, Manifest] = {}
        self._recasts: dict[int, DtypeMapping] = {}
        wire = context.settings.wire
        self._travels = WIDER if wire == "none" else {**WIDER, "float32": wire}  # sent dtype by gradient dtype
        self._buffers = BufferPool()  # for sums that are sent in another dtype
        self._averages: dict[int, SharedBuffers] = {}  # by group; the launching thread adds them
        self._devices: dict[int, Device] = {}  # by group whose gradients lie on a device
        self._in_place: set[int] = set()  # those groups whose averages are pinned, so that the device copies them itself
        self._host = layout.hosts[layout.host_of(rank)]
        self._contributions = Contributions(self._host, context.on_failure)
        self._members = [
            Connection(rank, each, self._host.index(each), link, self._contributions, self._gathered, self._report, self._fail)
            for each, link in links.items()
        ]
        # Single operations on a dict are atomic; the dispatcher adds a key, and it is removed when its average is there.
        self._started: dict[PartitionKey, _Started] = {}
        self._work = threading.Condition()  # the launching thread waits here; guards what follows
        self._collected: list[CommTask] = []  # to be reported
        self._on_collected: Collected = lambda tasks: None
        self._launches: LaunchQueue[_Started] = LaunchQueue(self.ordered, self.channels)
        self._launcher = threading.Thread(target=self._launch_all, name="commsched-host-launch", daemon=True)
        try:
            self._launcher.start()
            for member in self._members:
                member.begin()
            context.when_failed(lambda error: self._end_links())  # ends the waits for members
        except BaseException:
            self.close(graceful=False)
            raise

    # --- interfaces.Transport ---

    def add_group(self, group: int, manifest: Manifest) -> None:
        recast = DtypeMapping(manifest, self._travels)
        self._manifests[group], self._recasts[group] = manifest, recast
        if self._network is not None:
            self._network.add_group(group, recast.manifest)
        self._contributions.add_group(0, group, manifest)

    def mirror(self, group: int, manifest: Manifest, device: Device) -> None:
        """See ``interfaces.Transport``. This rank reads its own contribution wherever it is."""
        self._devices[group] = device

    def norm_rows(self, manifest: Manifest) -> int:
        """See ``interfaces.Transport``. The network measures what it averages, so averages that are rounded behind it have no
        norms."""
        rounds = any(spec.dtype in WIDER for spec in manifest.tensors)
        return 0 if self._network is None or self.ordered or rounds else self._network.norm_rows(manifest)

    def collect(self, task: CommTask, collected: Collected) -> None:
        self._on_collected = collected
        self._push(_key(task), _Started(task))
        self._report()

    def start(self, task: CommTask, completion: Completion) -> None:
        key = _key(task)
        with self._work:
            self._launches.expect(key, task.channel)
            started = self._started.get(key)
            if started is not None:  # it is collected already
                started.completion = completion
                if started.complete is not None:
                    self._queue(key, started)
        if not self.ordered:
            completion.on_sent(task)
        if started is None:
            self._push(key, _Started(task, completion=completion))

    def _push(self, key: PartitionKey, started: _Started) -> None:
        """Add this rank's contribution to those of its members."""
        if self._closed:
            raise ClosedError("this transport is closed")
        task, at = started.task, started.task.partition
        self._started[key] = started

        def reply(result: memoryview) -> None:
            if result is task.data:
                return
            if task.group in self._in_place:
                task.data = result
            else:
                np.copyto(np.frombuffer(task.data, np.uint8), np.frombuffer(result, np.uint8))

        self._gathered(key, self._contributions.push(0, key, at.dtype, at.start, at.stop, task.data, reply))

    def release(self, group: int) -> None:
        """See ``interfaces.Transport``. Every member has made its last push to the group and was notified of the average. The
        member reads the average through a mapping of its own."""
        for of in (self._manifests, self._recasts, self._averages, self._devices):
            of.pop(group, None)
        self._in_place.discard(group)
        for member in self._members:
            member.release(group)
        self._contributions.release(0, (group,))
        if self._network is not None:
            self._network.release(group)

    def leave(self, rank: int) -> None:
        if rank in self._host:
            self._contributions.leave(self._host.index(rank))
        if rank in self._layout.leaders and self._network is not None:
            # A leader leaves only after everything its host had to send is sent. When another rank leaves, the leader of its
            # host knows which tasks wait for it.
            self._network.leave(self._layout.host_of(rank))

    def close(self, graceful: bool = True) -> None:
        if graceful and not self._closed:
            for member in self._members:
                with suppress(OSError):
                    member.link.send(LocalMessage(Kind.GOODBYE), wait=False)
        with self._work:
            self._closed = True
            self._work.notify()
        self._end_links()
        if self._launcher.ident is not None:  # the thread has begun
            self._launcher.join()
        for member in self._members:
            member.close()
        if self._network is not None:
            self._network.close(graceful)
        self._contributions.close()
        self._started.clear()
        self._averages.clear()

    # --- any thread ---

    def _gathered(self, key: PartitionKey, complete: Complete | None) -> None:
        """Queue the launch of ``key`` if ``complete`` shows that all ranks of the host have contributed."""
        if complete is None:
            return
        started = self._started[key]
        with self._work:
            started.complete = complete
            if started.completion is None:
                self._collected.append(started.task)
            else:
                self._queue(key, started)

    def _report(self) -> None:
        """Report the tasks that are collected. Those that were completed together are reported together."""
        if not self._collected:
            return
        with self._work:
            tasks, self._collected = self._collected, []
        self._on_collected(tasks)

    def _queue(self, key: PartitionKey, started: _Started) -> None:
        """Queue the launch of ``key``, which is started and complete. Called with the lock held."""
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
                said = f"rank {self.rank} failed at {self._name(started.task)}: {error_text(error)}"
                self._fail(TransportError(said, rank=self.rank, step=started.task.step))
            del started  # it holds memory, which may be released before the next launch

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
        calls = Calls(lambda sent: self._sent(started), lambda done: self._arrived(started, done.data, result))
        self._network.start(self._recasts[task.group].task(task, data), calls)

    def _sum(self, task: CommTask, complete: Complete, result: memoryview) -> memoryview:
        """Return the host's sum in the dtype that is sent: in ``result``, or in other memory if the dtypes differ."""
        dtype = task.partition.dtype
        travels = self._travels.get(dtype, dtype)
        data = result if travels == dtype else self._buffers.take(task.nbytes // ITEMSIZE[dtype] * ITEMSIZE[travels])
        if dtype in WIDER:
            total(complete.payloads, dtype, data)
            return data
        if result is not task.data:  # the data of a host's only rank is its sum already
            total(complete.payloads, dtype, result)
        if travels != dtype:
            narrow(result, travels, data)
        return data

    def _result(self, task: CommTask) -> memoryview:
        """Return the memory for the average, which the members can read."""
        if not self._members:
            data: memoryview = task.data
            return data
        at = task.partition
        if task.group not in self._averages:
            self._share(task.group)
        return self._averages[task.group].part(at.dtype, at.start, at.stop)

    def _share(self, group: int) -> None:
        """Create the shared memory for the averages of ``group``, and pass it to every member."""
        averages, fd = create_buffers(self._manifests[group], self.rank)
        device = self._devices.get(group)
        if device is not None and averages.pin(device, self.rank):
            self._in_place.add(group)
        self._averages[group] = averages
        try:
            for member in self._members:
                member.tell(LocalMessage(Kind.MEMORY, group=group), (fd,))
        finally:
            os.close(fd)

    # --- the launching thread or a thread of the network transport ---

    def _arrived(self, started: _Started, data: memoryview, result: memoryview) -> None:
        """Convert ``data``, the average from the network, into ``result``, and finish the task."""
        dtype = started.task.partition.dtype
        if dtype in WIDER:
            narrow(data, dtype, result)
        elif data is not result:
            widen(data, self._travels[dtype], result)
        self._finish(started, result)

    def _finish(self, started: _Started, result: memoryview) -> None:
        task, complete, completion = started.task, started.complete, started.completion
        assert complete is not None
        assert completion is not None
        own, *others = complete.replies
        for reply in (*others, own):  # the members may copy while this thread copies
            reply(result)
        del result, own, others
        complete.replies.clear()
        del self._started[_key(task)]
        completion.on_done(task)

    def _sent(self, started: _Started) -> None:
        if self.ordered and started.completion is not None:
            started.completion.on_sent(started.task)

    # --- for messages ---

    def _name(self, task: CommTask) -> str:
        at = task.partition
        return f"tensor {self._manifests[task.group].names_in(at.dtype, at.start, at.stop)} of step {task.step}"


def _key(task: CommTask) -> PartitionKey:
    return PartitionKey(task.group, task.step, task.partition.index)
