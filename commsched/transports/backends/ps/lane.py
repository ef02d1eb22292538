"""Lanes: each carries a worker's pushes to one shard, and the results back. A shard in the same process needs no socket."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from ....core.errors import (
    ClosedError,
    CommschedError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    TransportError,
    error_text,
    from_record,
)
from ....core.manifest import Manifest
from ....core.task import CommTask
from ...averaging.contributions import PartitionKey
from .frame import RAW, Damaged, Frame, FrameKind, WorkerHello, json_frame
from .service import Service
from .stream import Altered, StreamBroken, WorkerStream

if TYPE_CHECKING:
    from .transport import PsTransport


class OwnLane:
    """Calls the aggregator of this process. See ``RemoteLane``. A push may compute the average, and queue it to other ranks."""

    def __init__(self, rank: int, service: Service, listener: PsTransport) -> None:
        self._rank = rank
        self._service = service
        self._listener = listener
        self._closed = False

    def add_group(self, group: int, manifest: Manifest) -> None:
        self._service.aggregator.add_group(self._rank, group, manifest)

    def release(self, groups: Sequence[int]) -> None:
        self._service.aggregator.release(self._rank, groups)

    def push(self, task: CommTask) -> None:
        if self._closed:
            raise ClosedError("this lane is closed")
        at = task.partition
        key = PartitionKey(task.group, task.step, at.index)

        def reply(result: memoryview) -> None:
            if not self._closed:
                self._listener.on_result(self._rank, Frame(FrameKind.RESULT, *key, at.dtype, at.start, at.stop, result))

        self._listener.on_sent(self._rank, key)
        try:
            self._service.aggregator.push(self._rank, key, at.dtype, at.start, at.stop, task.data, reply)
        except CommschedError as error:
            self._service.fail(error)  # the other ranks wait for this push

    def leave(self, rank: int) -> None:
        self._service.aggregator.leave(rank)

    def abort(self) -> None:
        self._closed = True

    def close(self, graceful: bool) -> None:
        self._closed = True


#: How long a closing lane waits for the server's answer to its goodbye.
_GOODBYE_SECONDS = 2.0

#: How long it waits for its threads. A thread that is looking up a host name cannot be ended, and ends after the lookup.
_END_SECONDS = 5.0


@dataclass(eq=False)
class _Flow:
    """One of a lane's streams, and what the server has said on it."""

    stream: WorkerStream
    welcomed: bool = False
    said_goodbye: bool = False


class RemoteLane:
    """The lane to a server in another process, over one or several streams of any carrier, which share their gradients: each
    takes the most urgent push when it is free.

    The constructor only begins to connect. ``wait_connected`` must return before the first push. ``listener`` is called from
    the lane's own threads or the carrier's, without a lock held. For one key, its ``on_sent`` returns before ``on_result`` is
    called.
    """

    def __init__(self, streams: Sequence[WorkerStream], hello: WorkerHello, listener: PsTransport) -> None:
        self._flows = [_Flow(stream) for stream in streams]
        self._peer = streams[0].peer
        self._outbox = streams[0].outbox
        self._server = hello.server
        self._rank = f"rank {hello.member}"
        self._listener = listener
        self._rows: dict[int, int] = {}  # by group whose averages are rows of norms: the group that these are about
        self._connected = threading.Event()  # set when this rank was welcomed, or the lane ended
        self._lock = threading.Lock()  # guards what is known of all flows together
        self._welcomed = False
        self._end: CommschedError | None = None  # why nothing more can be pushed
        self._closed = False
        self._readers = []
        for number, flow in enumerate(self._flows):
            flow.stream.outbox.put_control(json_frame(FrameKind.HELLO, hello.of_flow(number).to_record()))
            name = f"commsched-lane-{hello.rank}-to-{hello.server}" + (f"-flow-{number}" if number else "")
            self._readers.append(threading.Thread(target=self._read, args=(flow,), name=name, daemon=True))
        try:
            for reader in self._readers:
                reader.start()
        except BaseException:  # for example, the system has no thread left
            self._readers = [reader for reader in self._readers if reader.ident is not None]
            self.close(graceful=False)
            raise

    def wait_connected(self, within_seconds: float) -> None:
        """Return when the server has welcomed this rank.

        Raises:
            PeerTimeout: the server did not answer within that time.
            ConfigError: the server has another token, or this rank is not one of its job.
            PeerLost: the connection ended before the welcome.
            CommschedError: the job failed meanwhile.
        """
        if not self._connected.wait(within_seconds):
            raise PeerTimeout(
                f"{self._peer} did not answer within {within_seconds:.0f} s (is it up, with the same lane and security?)"
            )
        if not self._welcomed:
            raise self._end or PeerLost(f"{self._peer} ended before it answered")

    def give_up(self, error: CommschedError) -> None:
        """The job failed: make a pending ``wait_connected`` raise ``error``. Thread-safe."""
        if not self._welcomed:
            self._end = self._end or error
            self._connected.set()

    def add_group(self, group: int, manifest: Manifest) -> None:
        """Announce a group before its first push."""
        if manifest.norms is not None:
            self._rows[group] = manifest.norms.group
        self._say(json_frame(FrameKind.GROUP, manifest.to_record(), group))  # on each flow before its first push of it

    def release(self, groups: Sequence[int]) -> None:
        """Notify the server that this rank is done with ``groups``."""
        for group in groups:
            self._rows.pop(group, None)
        self._say(json_frame(FrameKind.RELEASED, groups))  # on each flow behind its announcements of them

    def push(self, task: CommTask) -> None:
        """Send ``task.data``, which must not change until the result has come. Never waits for other ranks.

        Raises:
            PeerLost: the server is gone.
            CommschedError: the lane failed for another reason, or is closed.
        """
        if self._end is not None:
            raise self._end
        at = task.partition
        frame = Frame(FrameKind.PUSH, task.group, task.step, at.index, at.dtype, at.start, at.stop, task.data, task.order)
        sent: Callable[[], None] = partial(self._listener.on_sent, self._server, frame.key)
        about = self._rows.get(task.group)
        if len(self._flows) == 1 or about is None:
            return self._outbox.put(frame, sent, about=about)
        # A row must come behind all contributions, and a contribution may still be leaving on any flow. The server takes the
        # row when it has come on all of them.
        sent = _last_of(len(self._flows), sent)
        for flow in self._flows:
            flow.stream.outbox.put(frame, sent, only_here=True, about=about)

    def leave(self, rank: int) -> None:
        """Notify the server that ``rank`` will push nothing more, so that no rank waits for it."""
        self._say(json_frame(FrameKind.LEFT, rank))

    def abort(self) -> None:
        """End at once, without a wait: ``close`` waits. The listener is not called afterwards. Idempotent."""
        self._closed = True
        for flow in self._flows:
            flow.stream.abort()

    def close(self, graceful: bool) -> None:
        """Say goodbye if ``graceful``, and end. The listener is not called afterwards. Idempotent."""
        self._closed = True
        if graceful and self._welcomed and self._end is None:
            self._say(Frame(FrameKind.GOODBYE))
            for flow in self._flows:
                flow.stream.outbox.finish()
            self._join(_GOODBYE_SECONDS)
        self.abort()
        self._join(_END_SECONDS)

    def _say(self, frame: Frame) -> None:
        for flow in self._flows:
            flow.stream.outbox.put_control(frame)

    def _join(self, within_seconds: float) -> None:
        deadline = monotonic() + within_seconds
        for reader in self._readers:
            reader.join(max(0.0, deadline - monotonic()))

    # --- the thread of each flow ---

    def _read(self, flow: _Flow) -> None:
        try:
            for frame in flow.stream.frames(self._place):
                if frame.kind is FrameKind.RESULT and self._welcomed:
                    self._listener.on_result(self._server, frame)
                else:
                    self._handle(flow, frame)
                del frame  # its memory may be reused before the next message comes
            if not flow.said_goodbye:
                self._ended(PeerLost(f"{self._peer} is gone: it ended the stream without a goodbye"))
        except Altered as why:
            self._ended(TransportError(why.describe(self._rank, self._peer)))
        except StreamBroken as broken:
            self._ended(PeerLost(f"{self._peer} is gone: {broken}"))
        except Damaged as damaged:
            what = (
                self._listener.describe(damaged.frame) if damaged.frame.kind in RAW else f"a {damaged.frame.kind.name} message"
            )
            self._ended(TransportError(f"{what} from {self._peer} arrived damaged at {self._rank}: {damaged}"))
        except ProtocolError as error:
            self._ended(ProtocolError(f"{self._peer} broke the protocol: {error}"))
        except CommschedError as error:
            self._ended(error)
        except Exception as error:
            self._ended(TransportError(f"the lane to {self._peer} failed: {error_text(error)}"))
        finally:
            flow.stream.close()

    def _place(self, frame: Frame) -> memoryview:
        if frame.kind is not FrameKind.RESULT or not self._welcomed:
            raise ProtocolError(f"{frame.kind.name} out of turn")
        return self._listener.destination(self._server, frame)

    def _handle(self, flow: _Flow, frame: Frame) -> None:
        if frame.kind is FrameKind.ERROR:
            self._ended(_error_in(frame))
        elif frame.kind is FrameKind.GOODBYE:
            self._said_goodbye(flow)
        elif frame.kind is FrameKind.HELLO and not flow.welcomed:
            with self._lock:
                flow.welcomed = True
                self._welcomed = all(each.welcomed for each in self._flows)
            if self._welcomed:
                self._connected.set()
        else:
            raise ProtocolError(f"{frame.kind.name} out of turn")

    def _said_goodbye(self, flow: _Flow) -> None:
        with self._lock:
            flow.said_goodbye = True
            if self._end is not None or not all(each.said_goodbye for each in self._flows):
                return  # results may still come on the others
            self._end = PeerLost(f"{self._peer} has closed")
        self._connected.set()
        if not self._closed:
            self._listener.on_end(self._server)

    def _ended(self, error: CommschedError) -> None:
        """Record why the lane ended. Only the first reason counts. Before the welcome, ``wait_connected`` raises it."""
        with self._lock:
            is_first = self._end is None
            self._end = self._end or error
        if is_first and self._welcomed and not self._closed:
            self._listener.on_broken(self._server, error)
        self._connected.set()


def _last_of(count: int, call: Callable[[], None]) -> Callable[[], None]:
    """A function that calls ``call`` when it is called for the last of ``count`` times, from any thread."""
    left = itertools.count(count - 1, -1)

    def called() -> None:
        if next(left) == 0:  # atomic
            call()

    return called


def _error_in(frame: Frame) -> CommschedError:
    record = frame.json()
    if not isinstance(record, dict) or not all(isinstance(value, str) for value in record.values()):
        raise ProtocolError("an ERROR message does not hold an error")
    return from_record(record)
