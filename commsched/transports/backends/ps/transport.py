"""PsTransport: the worker's side of the parameter servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from ....core.errors import ClosedError, CommschedError, ConfigError, PeerLost, ProtocolError
from ....core.interfaces import Completion, Transport
from ....core.manifest import Manifest
from ....core.task import CommTask
from ...averaging.contributions import PartitionKey
from ...backend import TransportContext
from .frame import Frame, WorkerHello
from .lane import OwnLane, RemoteLane
from .server import Shard
from .stream import StreamOptions, open_streams


@dataclass(slots=True, eq=False)
class _Started:
    """A started task whose average has not come yet."""

    task: CommTask
    completion: Completion
    server: int
    sent: bool = False


class PsTransport(Transport):
    """Averages partitions through ``servers``, each of which sums the partitions placed on it. See ``interfaces.Transport``.

    The constructor connects to every server and returns when all servers have answered. With ``own_shard``, the server at
    index ``rank`` is that shard in this process, and is reached without a socket.

    Args:
        context: the transport's arguments. A server that is lost or breaks the protocol is reported to ``on_failure``. A server
            may take ``settings.join_within`` to come up. A server of another job refuses this rank.
        options: the options of the streams; the same object that ``own_shard`` uses. Closed with the transport.
        servers: ``host:port`` of every server, in the same order on all ranks.
        own_shard: this rank's shard, if every rank hosts one. Closed with the transport.

    Raises:
        PeerTimeout: a server did not answer in time; names the server.
        ConfigError: a server has another token or another job; names the server.
        CommschedError: the job failed meanwhile.
    """

    def __init__(
        self, context: TransportContext, options: StreamOptions, servers: Sequence[str], own_shard: Shard | None = None
    ) -> None:
        self.rank = context.world.rank
        self.world_size = context.world.world_size
        self._on_failure = context.on_failure
        self._own_shard = own_shard
        self.servers = len(servers)
        self._options = options
        # Without a rate limiter, pushes and replies give way to each other. A rate limiter orders all that this process sends.
        self._way = own_shard.service.right_of_way if own_shard is not None and options.rate_limiter is None else None
        self._closed = False
        # Single operations on a dict are atomic; the dispatcher adds a key, and the reader of its lane removes it.
        self._pending: dict[PartitionKey, _Started] = {}
        self._manifests: dict[int, Manifest] = {}  # for messages
        self._released: deque[int] = deque()  # groups of which servers are to be told that they are released
        self._peers = [
            f"rank {context.contributors.members[index]}'s shard at {address}" if own_shard else f"server {index} at {address}"
            for index, address in enumerate(servers)
        ]
        self._lanes: list[OwnLane | RemoteLane] = []
        try:
            first = self.rank % len(servers)  # each rank begins at another server, so that they do not all connect to one
            for index in (*range(first, len(servers)), *range(first)):
                if own_shard is not None and index == self.rank:
                    self._lanes.append(OwnLane(self.rank, own_shard.service, self))
                    continue
                streams = open_streams(self._peers[index], servers[index], options, context.job, context.settings.flows)
                if self._way is not None:
                    streams[0].outbox.yield_to(self._way)  # the other flows share its gradients
                self._lanes.append(RemoteLane(streams, WorkerHello.of(context, index), self))
            self._lanes = [*self._lanes[len(servers) - first :], *self._lanes[: len(servers) - first]]  # by index
            connecting = [lane for lane in self._lanes if isinstance(lane, RemoteLane)]
            # If another rank fails, the server that this rank waits for may never come.
            for remote in connecting:
                context.when_failed(remote.give_up)
            deadline = monotonic() + context.settings.join_within
            for remote in connecting:
                remote.wait_connected(max(0.0, deadline - monotonic()))
        except BaseException as error:
            context.could_not_start(error)  # else the connected servers would report first that this rank is gone
            self.close(graceful=False)
            raise

    # --- interfaces.Transport ---

    def add_group(self, group: int, manifest: Manifest) -> None:
        """See ``interfaces.Transport``.

        Raises:
            ConfigError: ``group`` is beyond the 32 bits that the wire has for it.
        """
        if group >= 2**32:
            raise ConfigError(f"group {group} is one too many: a job may have {2**32} groups of tensors")
        self._manifests[group] = manifest
        released = []
        while self._released:
            released.append(self._released.popleft())
        for lane in self._lanes:
            if released:
                lane.release(released)
            lane.add_group(group, manifest)

    def norm_rows(self, manifest: Manifest) -> int:
        return len(self._lanes)  # each shard makes its own averages

    def start(self, task: CommTask, completion: Completion) -> None:
        if self._closed:
            raise ClosedError("this transport is closed")
        partition, server = task.partition.index, task.partition.server
        if server >= len(self._lanes):
            raise ValueError(f"{task!r} is for server {server} of {len(self._lanes)}: its plan is for other servers")
        self._pending[PartitionKey(task.group, task.step, partition)] = _Started(task, completion, server)
        if self._way is not None and server != self.rank:
            manifest = self._manifests.get(task.group)
            norms = None if manifest is None else manifest.norms
            self._way.push_begins((task.group if norms is None else norms.group, task.step))
        self._lanes[server].push(task)

    def release(self, group: int) -> None:
        """See ``interfaces.Transport``. Servers learn of it with the next group: groups are few, or one comes for each value
        that is averaged once. So no message is sent for it alone."""
        if self._manifests.pop(group, None) is not None:
            self._released.append(group)
        if self._way is not None:
            self._way.release(group)

    def leave(self, rank: int) -> None:
        # A rank that leaves notifies every server itself. If all ranks notified all servers of it, a job with a shard on every
        # rank would end with as many messages as the cube of its ranks.
        for server, lane in enumerate(self._lanes):
            if rank == self.rank or (self._own_shard is not None and server == self.rank):
                lane.leave(rank)

    def close(self, graceful: bool = True) -> None:
        self._closed = True
        if not graceful:
            for lane in self._lanes:  # all before any is waited for: one that connects holds a place that others wait for
                lane.abort()
        for lane in self._lanes:
            lane.close(graceful)
        if self._own_shard is not None:
            self._own_shard.close(graceful)
        self._options.close()
        self._pending.clear()

    # --- calls of the lane to ``server``; they raise ProtocolError if no task of this rank waits for what came ---

    def on_sent(self, server: int, key: PartitionKey) -> None:
        """The push of ``key`` has left this rank."""
        started = self._started(server, key)
        if started.sent:
            raise ProtocolError(f"{started.task!r} was acknowledged twice")
        started.sent = True
        if self._way is not None and server != self.rank:
            self._way.push_left()
        started.completion.on_sent(started.task)

    def destination(self, server: int, frame: Frame) -> memoryview:
        """Return the memory for the average that ``frame`` announces."""
        started = self._started(server, frame.key)
        task, at = started.task, started.task.partition
        if (frame.dtype, frame.start, frame.stop) != (at.dtype, at.start, at.stop):
            raise ProtocolError(f"{frame.dtype} bytes {frame.start} to {frame.stop} are not an average of {task!r}")
        if not started.sent:
            raise ProtocolError(f"an average of {task!r} came before that task was sent")
        data: memoryview = task.data
        return data

    def on_result(self, server: int, frame: Frame) -> None:
        """The average of ``frame.key`` has come. Its payload is the ``destination``, or read-only memory to copy from."""
        key = frame.key
        started = self._pending.get(key)
        if started is None or frame.payload is not started.task.data:  # otherwise it lies where ``destination`` said
            destination = self.destination(server, frame)
            np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(frame.payload, np.uint8))
            started = self._started(server, key)
        del self._pending[key]
        started.completion.on_done(started.task)

    def describe(self, frame: Frame) -> str:
        """Name the average that ``frame`` announces in a message: its partition, step and tensor."""
        manifest = self._manifests.get(frame.group)
        names = "no tensor" if manifest is None else manifest.names_in(frame.dtype, frame.start, frame.stop)
        return f"the average of partition {frame.partition} of step {frame.step}, tensor {names},"

    def on_end(self, server: int) -> None:
        """The server ended in good order. Nothing more comes."""
        waiting = [key for key, started in list(self._pending.items()) if started.server == server]
        if waiting:
            self.on_broken(
                server, PeerLost(f"{self._peers[server]} closed while {self._pending[waiting[0]].task!r} waits for it")
            )

    def on_broken(self, server: int, error: CommschedError) -> None:
        """The lane failed, or the server reported a failure. Nothing more comes."""
        if not self._closed:
            self._on_failure(error)

    def _started(self, server: int, key: PartitionKey) -> _Started:
        started = self._pending.get(key)
        if started is None or started.server != server:
            raise ProtocolError(f"an answer to step {key.step}, partition {key.partition}, which expects no answer there")
        return started
