"""PsTransport: a worker's side of the parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic

import numpy as np

from ...core.errors import ClosedError, CommschedError, ConfigError, PeerLost, ProtocolError
from ...core.manifest import Manifest
from ...core.placement import place
from ...core.ports import Completion, OnFailure
from ...core.task import ALL_REDUCE, CommTask
from ..contributions import Key
from .carriers import open_stream
from .frame import Frame
from .hello import Hello
from .lane import Lane
from .outbox import Outbox
from .own_lane import OwnLane
from .pacer import Pacer
from .remote_lane import RemoteLane
from .shard import Shard


@dataclass(slots=True, eq=False)
class _Started:
    """A task on its way."""

    task: CommTask
    completion: Completion
    sent: bool = False


class PsTransport:
    """Averages partitions through ``servers``, each of which sums the partitions placed on it. See ``ports.Transport``.

    The constructor connects to every server and returns when all have answered. With ``own_shard``, the server at index
    ``rank`` is that shard in this process, and is reached without a socket.

    Args:
        servers: ``host:port`` of every server, in the same order on all ranks.
        token: the job's secret.
        lane: what carries messages, a name in ``carriers``; that of the servers.
        on_failure: told when a server is lost or breaks the protocol, from any thread.
        own_shard: closed with the transport.
        pacer: caps what is sent; the same object that ``own_shard`` has. Closed with the transport.
        control_address: where rank 0's control channel listens, for servers that no rank started.
        fail_after_seconds: bounds how long a frozen connection lives; the same for all processes of a job.
        connect_within_seconds: how long a server may take to come up.
        members, divisor: see ``TransportContext``; those of ``own_shard``. None: the ranks are those of the job.

    Raises:
        PeerTimeout: a server did not answer in time; names it.
        ConfigError: a server has another token or another job; names it.
    """

    verbs = frozenset({ALL_REDUCE})
    ordered = False
    channels = 1

    def __init__(
        self,
        rank: int,
        world_size: int,
        servers: Sequence[str],
        token: str,
        *,
        lane: str = "tcp",
        on_failure: OnFailure,
        own_shard: Shard | None = None,
        pacer: Pacer | None = None,
        control_address: str | None = None,
        fail_after_seconds: float = 10.0,
        connect_within_seconds: float = 60.0,
        when_failed: Callable[[OnFailure], None] = lambda callback: None,
        members: Sequence[int] | None = None,
        divisor: int | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._on_failure = on_failure
        self._own_shard = own_shard
        self._pacer = pacer
        # A pacer orders what this process sends by itself.
        self._way = own_shard.service.right_of_way if own_shard is not None and pacer is None else None
        self._closed = False
        # Single operations on a dict are atomic; a key is added by the dispatcher and removed by its lane's reader.
        self._pending: dict[Key, _Started] = {}
        self._peers = [
            f"rank {members[k] if members else k}'s shard at {a}" if own_shard else f"server {k} at {a}"
            for k, a in enumerate(servers)
        ]
        self._lanes: list[Lane] = []
        connecting: list[RemoteLane] = []
        try:
            for index, address in enumerate(servers):
                if own_shard is not None and index == rank:
                    self._lanes.append(OwnLane(rank, own_shard.service, self))
                    continue
                hello = Hello(rank, world_size, index, control_address, tuple(members) if members else None, divisor)
                stream = open_stream(lane, self._peers[index], address, token, Outbox(pacer), fail_after_seconds)
                connecting.append(RemoteLane(stream, hello, self))
                self._lanes.append(connecting[-1])
            # Somebody else's failure: the server that we wait for may never come.
            when_failed(partial(_give_up, connecting))
            deadline = monotonic() + connect_within_seconds
            for remote in connecting:
                remote.wait_connected(max(0.0, deadline - monotonic()))
        except BaseException:
            self.close(graceful=False)
            raise

    # --- ports.Transport ---

    def add_group(self, group: int, manifest: Manifest) -> None:
        """See ``ports.Transport``.

        Raises:
            ConfigError: more groups than the wire can number.
        """
        if group >= 2**16:
            raise ConfigError(f"group {group} is one too many: a job may have {2**16} groups of tensors")
        for lane in self._lanes:
            lane.add_group(group, manifest)

    def start(self, task: CommTask, completion: Completion) -> None:
        """See ``ports.Transport``.

        Raises:
            PeerLost: the partition's server is gone.
            ClosedError: after ``close``.
        """
        if self._closed:
            raise ClosedError("this transport is closed")
        partition = task.partition.index
        self._pending[Key(task.group, task.step, partition)] = _Started(task, completion)
        lane = self._lanes[place(partition, len(self._lanes))]
        if self._way is not None and lane is not self._lanes[self.rank]:
            self._way.take()
        lane.push(task)

    def release(self, group: int) -> None:
        """Nothing to do: servers keep its manifest, by which they name a rank that breaks the rules."""

    def leave(self, rank: int) -> None:
        # Told to every server by every rank: the leaver's own shard, or a separate server, may hear it from nobody else.
        for lane in self._lanes:
            lane.leave(rank)

    def close(self, graceful: bool = True) -> None:
        self._closed = True
        for lane in self._lanes:
            lane.close(graceful)
        if self._own_shard is not None:
            self._own_shard.close(graceful)
        if self._pacer is not None:
            self._pacer.close()
        self._pending.clear()

    # --- LaneListener ---

    def on_sent(self, server: int, key: Key) -> None:
        started = self._started(server, key)
        if started.sent:
            raise ProtocolError(f"{started.task!r} was acknowledged twice")
        started.sent = True
        if self._way is not None and server != self.rank:
            self._way.give_back()
        started.completion.on_sent(started.task)

    def destination(self, server: int, frame: Frame) -> memoryview:
        started = self._started(server, frame.key)
        task, at = started.task, started.task.partition
        if (frame.dtype, frame.start, frame.stop) != (at.dtype, at.start, at.stop):
            raise ProtocolError(f"{frame.dtype} bytes {frame.start} to {frame.stop} are no average of {task!r}")
        if not started.sent:
            raise ProtocolError(f"an average of {task!r} came before that was sent")
        data: memoryview = task.data
        return data

    def on_result(self, server: int, frame: Frame) -> None:
        destination = self.destination(server, frame)
        if frame.payload is not destination:
            np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(frame.payload, np.uint8))
        started = self._pending.pop(frame.key)
        started.completion.on_done(started.task)

    def on_end(self, server: int) -> None:
        waiting = [key for key in list(self._pending) if place(key.partition, len(self._lanes)) == server]
        if waiting:
            self.on_broken(
                server, PeerLost(f"{self._peers[server]} closed while {self._pending[waiting[0]].task!r} waits for it")
            )

    def on_broken(self, server: int, error: CommschedError) -> None:
        if not self._closed:
            self._on_failure(error)

    def _started(self, server: int, key: Key) -> _Started:
        started = self._pending.get(key)
        if started is None or place(key.partition, len(self._lanes)) != server:
            raise ProtocolError(f"an answer to step {key.step}, partition {key.partition}, which waits for none there")
        return started


def _give_up(lanes: Sequence[RemoteLane], error: CommschedError) -> None:
    for lane in lanes:
        lane.give_up(error)
