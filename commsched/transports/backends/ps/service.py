"""The protocol of a parameter server: handles the messages of each stream, around one Aggregator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ....core.errors import CommschedError, ConfigError, PeerLost, ProtocolError, TransportError, to_record
from ....core.interfaces import OnFailure
from ....core.manifest import Manifest
from ....net.rpc import called
from ...averaging.aggregator import Aggregator
from ...averaging.contributions import Reply
from ...backend import Contributors
from .frame import RAW, Damaged, Frame, FrameKind, WorkerHello, json_frame
from .send_queue import PushPriority
from .stream import Altered, Stream, StreamBroken

log = logging.getLogger("commsched")


@dataclass(eq=False)
class _Worker:
    """The worker at the other end of a stream. ``rank`` is None until its hello was accepted."""

    stream: Stream
    job: str
    rank: int | None = None
    member: int | None = None  # the job's rank, which names it in messages

    def __str__(self) -> str:
        return self.stream.peer if self.rank is None else f"rank {self.member} ({self.stream.peer})"


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
    """Serves one job: accepts one stream per rank, and fails as a whole when one of them breaks."""

    def __init__(self, context: ServiceContext) -> None:
        #: Taken by the pushes of a rank in the same process; replies of this server give way to them.
        self.push_priority = PushPriority()
        self._context = context
        self._name = context.name
        self._lock = threading.Lock()
        self._welcoming = threading.Event()  # set when hellos are answered
        self._aggregator = None if context.contributors is None else Aggregator(context.contributors, self.fail)
        self._workers: list[_Worker] = []
        self._greeted: dict[int, WorkerHello] = {}  # by rank, of the ranks that have or had a stream
        self._left: set[int] = set()
        self._failure: CommschedError | None = None
        self._closed = False
        self._job = context.job

    @property
    def aggregator(self) -> Aggregator:
        """Computes the averages. There is none before the world size is known, from a worker's hello at the latest."""
        assert self._aggregator is not None
        return self._aggregator

    @property
    def job(self) -> str:
        """The job's name. If it was not given, it is empty until the first worker was greeted."""
        return self._job or ""

    def serve(self, stream: Stream, job: str = "") -> None:
        """Handle the messages of ``stream`` until it ends, and finish ``stream.outbox``. The carrier's thread calls it.

        ``job`` is the name of the worker's job, which the worker has proved.
        """
        worker = _Worker(stream, job)
        with self._lock:
            if self._closed:
                return stream.outbox.abort()
            self._workers.append(worker)
        stream.outbox.yield_to(self.push_priority)
        try:
            self._hear(worker)
        except ConfigError as error:  # a stranger or a worker of another job; this job has not failed
            log.warning("%s refused %s: %s", self._name, worker, error)
            _refuse(worker, error)
        except CommschedError as error:
            _refuse(worker, error)
            self.fail(error)
        except Exception as error:
            log.exception("%s failed", self._name)
            self.fail(TransportError(f"{self._name} failed: {type(error).__name__}: {error}"))
        finally:
            stream.outbox.finish()
            stream.outbox.stop_yielding()
            with self._lock:
                self._workers.remove(worker)

    def fail(self, error: CommschedError) -> None:
        """End the job: report the first failure to every worker and to ``on_failure``. Thread-safe."""
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            workers = list(self._workers)
        self._welcoming.set()
        for worker in workers:
            _refuse(worker, error)
        self._context.on_failure(error)

    def close(self) -> None:
        """End every stream in good order. Idempotent. Callable from any thread, also from a stream's own."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
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
                    self._push(worker.rank, worker.stream, frame)
                elif frame.kind is FrameKind.GOODBYE and worker.rank is not None:
                    return self._goodbye(worker.rank)
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

    def _push(self, rank: int, stream: Stream, frame: Frame) -> None:
        given = not memoryview(frame.payload).readonly  # the payload lies in the memory from ``_place``
        # Every rank waits for all rows, which are small. Their pushes come last, so a reply has not the order of its push.
        reply = _reply_to(stream, frame, 0 if self.aggregator.has_rows(frame.group) else frame.order)
        self.aggregator.push(rank, frame.key, frame.dtype, frame.start, frame.stop, frame.payload, reply, given=given)

    def _handle(self, worker: _Worker, frame: Frame) -> None:
        if frame.kind is FrameKind.HELLO and worker.rank is None:
            self._greet(worker, WorkerHello.from_record(frame.json()))
        elif worker.rank is None:
            raise _out_of_turn(worker, frame)
        elif frame.kind is FrameKind.GROUP:
            self.aggregator.add_group(worker.rank, frame.group, Manifest.from_record(frame.json()))
        elif frame.kind is FrameKind.LEFT:
            self.aggregator.leave(self._rank_in(frame))
        else:
            raise _out_of_turn(worker, frame)

    def _rank_in(self, frame: Frame) -> int:
        rank = frame.json()
        if type(rank) is not int or not 0 <= rank < self.aggregator.contributors.world_size:
            raise ProtocolError(f"{str(rank)[:20]!r} is not a rank")
        return rank

    def _greet(self, worker: _Worker, hello: WorkerHello) -> None:
        with self._lock:
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
            if hello.rank in self._greeted:
                raise ConfigError(_greeted_twice(self._greeted[hello.rank], hello))
            self._greeted[hello.rank] = hello
            self._job = worker.job
            worker.rank, worker.member = hello.rank, hello.member
        if first:
            self._context.on_first_hello(hello)
            self._welcoming.set()
        self._welcoming.wait()
        worker.stream.outbox.put_control(json_frame(FrameKind.HELLO, {}))

    def _goodbye(self, rank: int) -> None:
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


def _reply_to(stream: Stream, push: Frame, order: int) -> Reply:
    _, group, step, partition, dtype, start, stop, _, _ = push

    def reply(result: memoryview) -> None:
        stream.outbox.put(Frame(FrameKind.RESULT, group, step, partition, dtype, start, stop, result, order))

    return reply


def _refuse(worker: _Worker, error: CommschedError) -> None:
    worker.stream.outbox.put_control(json_frame(FrameKind.ERROR, to_record(error)))
    worker.stream.outbox.finish()
