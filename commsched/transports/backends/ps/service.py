"""The protocol of a parameter server: handles the messages of each stream, around one Aggregator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ....core.errors import CommschedError, ConfigError, PeerLost, ProtocolError, TransportError, error_text, to_record
from ....core.interfaces import OnFailure
from ....core.manifest import Manifest
from ....net.rpc import called
from ...averaging.aggregator import Aggregator
from ...averaging.contributions import Reply
from ...backend import Contributors
from .frame import RAW, Damaged, Frame, FrameKind, WorkerHello, json_frame
from .right_of_way import RightOfWay
from .send_queue import SendQueue
from .stream import Altered, Stream, StreamBroken

log = logging.getLogger("commsched")


class _Flows:
    """The streams of one rank, and what it has said on them. Thread-safe."""

    def __init__(self, hello: WorkerHello, outbox: SendQueue) -> None:
        self.hello = hello  # the first
        self.outbox = outbox
        self.greeted = {hello.flow}
        self.announcing = threading.Lock()
        self.groups: set[int] = set()  # guarded by ``announcing``
        self._lock = threading.Lock()
        self._said: dict[Hashable, set[int]] = {}  # what was said on some of them

    def has_said_on_all(self, what: Hashable, flow: int) -> bool:
        """Note that the rank has said ``what`` on ``flow``. True if it has said so on all of its flows by now."""
        if self.hello.flows == 1:
            return True
        with self._lock:
            on = self._said.setdefault(what, set())
            on.add(flow)
            if len(on) < self.hello.flows:
                return False
            del self._said[what]
            return True


@dataclass(eq=False)
class _Worker:
    """The worker at the other end of a stream. ``rank`` is None until its hello was accepted."""

    stream: Stream
    job: str
    reserves: bool = False  # it is the launcher of an elastic job
    rank: int | None = None
    member: int | None = None  # the job's rank, which names it in messages
    flow: int = 0  # the number of the stream among those of this rank
    flows: _Flows | None = None
    groups: set[int] = field(default_factory=set)  # announced on this stream

    def __str__(self) -> str:
        return self.stream.peer if self.rank is None else f"rank {self.member} ({self.stream.peer})"

    def has_said_on_all(self, what: Hashable) -> bool:
        assert self.flows is not None
        return self.flows.has_said_on_all(what, self.flow)


class OfNextJob(Exception):
    """The job in hand has failed or is over, and a stream is not of it: the service of the next job is to handle that.
    ``hello`` is that of its worker, if it was read."""

    def __init__(self, hello: WorkerHello | None) -> None:
        super().__init__(hello)
        self.hello = hello


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """The arguments of a service.

    Attributes:
        name: the name of this server in messages.
        on_failure: called with the first failure, from any thread.
        contributors: ``None`` means that the first hello gives them.
        job: the job's name; ``None`` means the job of the first worker.
        on_first_hello: called once, with the first hello, by the thread of its stream. No hello is answered before it returns.
        on_all_left: called when every rank has said goodbye.
    """

    name: str
    on_failure: OnFailure
    contributors: Contributors | None = None
    job: str | None = None
    on_first_hello: Callable[[WorkerHello], None] = lambda hello: None
    on_all_left: Callable[[], None] = lambda: None


class Service:
    """Serves one job: accepts the streams of each rank, and fails as a whole when one of them breaks.

    A rank has one stream, or several that share the pushes and the replies. Where the order of messages counts, the rank says
    them on all its streams, and a message holds when it has come on all; a group is known from the first on.
    """

    def __init__(self, context: ServiceContext) -> None:
        #: Replies of this server, and pushes of a rank in the same process, give way to each other.
        self.right_of_way = RightOfWay()
        self._context = context
        self._name = context.name
        self._lock = threading.Lock()
        self._welcoming = threading.Event()  # set when hellos are answered
        self._aggregator = None if context.contributors is None else Aggregator(context.contributors, self.fail)
        self._workers: list[_Worker] = []
        self._greeted: dict[int, _Flows] = {}  # by rank, of the ranks that have or had a stream
        self._left: set[int] = set()
        self._failure: CommschedError | None = None
        self._closed = False
        self._job = context.job
        self._reserved_by: _Worker | None = None

    @property
    def aggregator(self) -> Aggregator:
        """Computes the averages. There is none before the world size is known, from a worker's hello at the latest."""
        assert self._aggregator is not None
        return self._aggregator

    @property
    def job(self) -> str:
        """The job's name. If it was not given, it is empty until the first worker was greeted."""
        return self._job or ""

    def serve(self, stream: Stream, job: str = "", hello: WorkerHello | None = None) -> None:
        """Handle the messages of ``stream`` until it ends, and finish ``stream.outbox``. The carrier's thread calls it.

        Args:
            job: the name of the worker's job, which the worker has proved.
            hello: the worker's, if an earlier service has read it.

        Raises:
            OfNextJob: the stream goes on.
        """
        worker = _Worker(stream, job)
        with self._lock:
            if self._closed and self._serves_one_of_many:
                raise OfNextJob(hello)
            if self._closed:
                return stream.outbox.abort()
            self._workers.append(worker)
        stream.outbox.yield_to(self.right_of_way)
        goes_on = False
        try:
            if hello is not None:
                self._greet(worker, hello)
            self._hear(worker)
        except OfNextJob:
            goes_on = True
            raise
        except ConfigError as error:  # a stranger or a worker of another job; this job has not failed
            log.warning("%s refused %s: %s", self._name, worker, error)
            _refuse(worker, error)
        except CommschedError as error:
            _refuse(worker, error)
            if self._is_foreign(worker):
                log.warning("%s refused %s: %s", self._name, worker, error)
            else:
                self.fail(error)
        except Exception as error:
            log.exception("%s failed", self._name)
            self.fail(TransportError(f"{self._name} failed: {error_text(error)}"))
        finally:
            if not goes_on:
                stream.outbox.finish()
            stream.outbox.stop_yielding()
            with self._lock:
                if not goes_on:
                    self._workers.remove(worker)
                if self._reserved_by is worker and not self._greeted:  # nobody of that job will come
                    self._job = self._reserved_by = None

    def _is_foreign(self, worker: _Worker) -> bool:
        """Whether ``worker`` has not said hello, and is of another job than the one in hand."""
        with self._lock:
            return worker.rank is None and self._job is not None and worker.job != self._job

    def fail(self, error: CommschedError) -> None:
        """End the job: report the first failure to every worker and to ``on_failure``. Thread-safe."""
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            workers = [worker for worker in self._workers if worker.rank is not None]  # the others hear it when they say hello
        self._welcoming.set()
        for worker in workers:
            _refuse(worker, error)
        self._context.on_failure(error)

    def close(self) -> None:
        """End every stream in good order, but those that may be of the next job. Idempotent. Callable from any thread, also
        from a stream's own."""
        with self._lock:
            self._closed = True
            workers = [each for each in self._workers if each.rank is not None or each.reserves or not self._serves_one_of_many]
        self._welcoming.set()
        if self._aggregator is not None:
            self._aggregator.close()
        for worker in workers:
            worker.stream.outbox.put_control(Frame(FrameKind.GOODBYE))
            worker.stream.outbox.finish()

    # --- a stream's own thread ---

    def _hear(self, worker: _Worker) -> None:
        try:
            for frame in worker.stream.frames(partial(self._place, worker)):
                if frame.kind is FrameKind.PUSH and worker.rank is not None:
                    self._push(worker, worker.rank, frame)
                elif frame.kind is FrameKind.GOODBYE and worker.rank is not None:
                    return self._goodbye(worker, worker.rank)
                else:
                    self._handle(worker, frame)
                del frame  # its memory may be reused before the next message comes
        except ProtocolError as error:
            raise ProtocolError(f"{self._name} got from {worker}: {error}") from error
        except Damaged as damaged:
            raise TransportError(f"{self._what(worker, damaged.frame)} arrived damaged at {self._name}: {damaged}") from damaged
        except Altered as why:
            raise TransportError(why.describe(self._name, str(worker))) from why
        except StreamBroken:
            pass  # handled below like an end without a goodbye
        if worker.rank is not None:
            raise PeerLost(f"rank {worker.member} is gone: its connection to {self._name} broke", rank=worker.member)

    def _what(self, worker: _Worker, frame: Frame) -> str:
        if frame.kind not in RAW:
            return f"a {frame.kind.name} message of {worker}"
        return f"{self.aggregator.describe(frame.key, frame.dtype, frame.start, frame.stop)} which {worker} pushed,"

    def _place(self, worker: _Worker, frame: Frame) -> memoryview:
        if worker.rank is None or frame.kind is not FrameKind.PUSH:
            raise _out_of_turn(worker, frame)
        self.aggregator.require_fitting(worker.rank, frame.key, frame.dtype, frame.start, frame.stop)
        return self.aggregator.buffers.take(frame.stop - frame.start)

    def _push(self, worker: _Worker, rank: int, frame: Frame) -> None:
        if self._closed:  # the port may serve the next job by now, and this worker of an earlier one was frozen or cut off
            raise ProtocolError("a push to a job that has ended")
        given = not memoryview(frame.payload).readonly  # the payload lies in the memory from ``_place``
        order, about = frame.order, self.aggregator.measured_by(frame.group)
        if about is not None:
            if not worker.has_said_on_all(frame.key):
                return  # a contribution to the averages may still come on another stream
            order = 0  # every rank waits for all rows, which are small; their pushes come last
        reply = _reply_to(worker.stream, frame, order, about)
        self.aggregator.push(rank, frame.key, frame.dtype, frame.start, frame.stop, frame.payload, reply, given=given)

    def _handle(self, worker: _Worker, frame: Frame) -> None:
        if frame.kind is FrameKind.HELLO and worker.rank is None:
            self._greet(worker, WorkerHello.from_record(frame.json()))
        elif frame.kind is FrameKind.RESERVE and worker.rank is None and self._context.job is None:
            self._reserve(worker)
        elif worker.rank is None:
            raise _out_of_turn(worker, frame)
        elif frame.kind is FrameKind.GROUP:
            self._announce(worker, worker.rank, frame.group, Manifest.from_record(frame.json()))
        elif frame.kind is FrameKind.RELEASED:
            self._release(worker, worker.rank, self._groups_in(frame))
        elif frame.kind is FrameKind.LEFT:
            left = self._rank_in(frame)
            if worker.has_said_on_all((FrameKind.LEFT, left)):
                self.aggregator.leave(left)
        else:
            raise _out_of_turn(worker, frame)

    def _reserve(self, worker: _Worker) -> None:
        """Serve the job of ``worker``, which is no rank, and no other, as long as its stream lasts; and say so. If a job is in
        hand there is no answer: its end ends this stream too, and the worker asks the next service."""
        with self._lock:
            worker.reserves = True
            if self._closed:
                worker.stream.outbox.finish()  # as its end would have
            if self._closed or self._greeted or self._failure is not None:
                return
            self._job, self._reserved_by = worker.job, worker
        worker.stream.outbox.put_control(json_frame(FrameKind.HELLO, {}))

    def _announce(self, worker: _Worker, rank: int, group: int, manifest: Manifest) -> None:
        flows = worker.flows
        assert flows is not None
        with flows.announcing:  # the stream of the second announcement goes on when the group is known
            if group in worker.groups or group not in flows.groups:
                self.aggregator.add_group(rank, group, manifest)
            flows.groups.add(group)
            worker.groups.add(group)

    def _release(self, worker: _Worker, rank: int, groups: Sequence[int]) -> None:
        flows = worker.flows
        assert flows is not None
        worker.groups.difference_update(groups)
        if worker.has_said_on_all((FrameKind.RELEASED, tuple(groups))):  # and has announced them on all, which comes before
            with flows.announcing:
                self.aggregator.release(rank, groups)
                flows.groups.difference_update(groups)

    def _rank_in(self, frame: Frame) -> int:
        rank = frame.json()
        if type(rank) is not int or not 0 <= rank < self.aggregator.contributors.world_size:
            raise ProtocolError(f"{str(rank)[:20]!r} is not a rank")
        return rank

    def _groups_in(self, frame: Frame) -> list[int]:
        groups = frame.json()
        if not isinstance(groups, list) or not all(type(group) is int for group in groups):
            raise ProtocolError(f"{str(groups)[:20]!r} are not groups")
        return groups

    def _greet(self, worker: _Worker, hello: WorkerHello) -> None:
        with self._lock:
            if self._serves_one_of_many and self._greeted and self._is_of_next_job(worker, hello):
                self._workers.remove(worker)  # now: ``close`` must not end its stream
                raise OfNextJob(hello)
            if self._failure is not None:
                raise self._failure
            if self._job is not None and worker.job != self._job:
                raise ConfigError(
                    f"rank {hello.member} belongs to {called(worker.job)}; this server serves {called(self._job)}"
                )
            first = not self._greeted
            if self._aggregator is None:
                self._aggregator = Aggregator(hello.contributors, self.fail)
            asked, known = hello.contributors, self._aggregator.contributors
            if asked.world_size != known.world_size:
                raise ConfigError(
                    f"rank {hello.member} says there are {asked.world_size} ranks; this job has {known.world_size}"
                )
            if asked != known:
                raise ConfigError(
                    f"rank {hello.member} says that the members are {asked.members} of {asked.divisor}; they are "
                    f"{known.members} of {known.divisor}"
                )
            earlier = next(iter(self._greeted.values())).hello if self._greeted else hello
            if hello.flows != earlier.flows:
                raise ConfigError(
                    f"rank {hello.member} has flows={hello.flows}, but rank {earlier.member} has flows={earlier.flows}; give "
                    "all ranks the same"
                )
            flows = self._greeted.get(hello.rank)
            if flows is None:
                flows = self._greeted[hello.rank] = _Flows(hello, worker.stream.outbox)
            elif hello.flow in flows.greeted or hello.of_flow(0) != flows.hello.of_flow(0):
                raise ConfigError(_greeted_twice(flows.hello, hello))
            else:
                flows.greeted.add(hello.flow)
                worker.stream.outbox.share_with(flows.outbox)
            self._job = worker.job
            worker.rank, worker.member, worker.flow, worker.flows = hello.rank, hello.member, hello.flow, flows
        if first:
            self._context.on_first_hello(hello)
            self._welcoming.set()
        self._welcoming.wait()
        worker.stream.outbox.put_control(json_frame(FrameKind.HELLO, {}))

    @property
    def _serves_one_of_many(self) -> bool:
        """Whether this is a server of its own, which has a service for each of many jobs."""
        return self._context.contributors is None

    def _is_of_next_job(self, worker: _Worker, hello: WorkerHello) -> bool:
        """Whether the job in hand is over, and ``worker`` is no late rank of it. Called with the lock held."""
        if self._failure is None:
            return self._closed
        greeted = next(iter(self._greeted.values())).hello  # two jobs may have the same name, or none
        return worker.job != self._job or hello.control_address != greeted.control_address

    def _goodbye(self, worker: _Worker, rank: int) -> None:
        if not worker.has_said_on_all(FrameKind.GOODBYE):
            return
        self.aggregator.leave(rank)
        with self._lock:
            self._left.add(rank)
            all_left = len(self._left) == self.aggregator.contributors.world_size
        if all_left:
            self._context.on_all_left()


def _greeted_twice(earlier: WorkerHello, hello: WorkerHello) -> str:
    if hello.server != earlier.server and hello.control_address == earlier.control_address:
        return f"servers {earlier.server} and {hello.server} are one process: it is named twice in servers"
    said = f"rank {hello.member} is connected already; two processes claim to be it"
    if hello.control_address == earlier.control_address:
        return said
    return (
        f"{said}, or two jobs without names were given one server: rank 0 of one is at {earlier.control_address}, of the "
        f"other at {hello.control_address}"
    )


def _out_of_turn(worker: _Worker, frame: Frame) -> ProtocolError:
    return ProtocolError(f"{frame.kind.name} {'before the hello' if worker.rank is None else 'out of turn'}")


def _reply_to(stream: Stream, push: Frame, order: int, about: int | None) -> Reply:
    _, group, step, partition, dtype, start, stop, _, _ = push

    def reply(result: memoryview) -> None:
        stream.outbox.put(Frame(FrameKind.RESULT, group, step, partition, dtype, start, stop, result, order), about=about)

    return reply


def _refuse(worker: _Worker, error: CommschedError) -> None:
    worker.stream.outbox.put_control(json_frame(FrameKind.ERROR, to_record(error)))
    worker.stream.outbox.finish()
