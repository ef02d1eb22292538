"""The protocol of a parameter server: what each stream may say, around one Aggregator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...core.errors import CommschedError, ConfigError, PeerLost, ProtocolError, TransportError, to_record
from ...core.manifest import Manifest
from ...core.ports import OnFailure
from ..aggregator import Aggregator
from ..contributions import Reply
from .frame import Frame, Kind, json_frame
from .hello import Hello
from .right_of_way import RightOfWay
from .stream import Stream, StreamBroken

log = logging.getLogger("commsched")


@dataclass(eq=False)
class _Worker:
    """Who is at the other end of a stream. ``rank`` is None until its hello was accepted."""

    stream: Stream
    rank: int | None = None
    member: int | None = None  # what messages call it

    def __str__(self) -> str:
        return self.stream.peer if self.rank is None else f"rank {self.member} ({self.stream.peer})"


class Service:
    """Serves one job: accepts one stream per rank, and fails as a whole when one of them breaks.

    Args:
        name: what messages call this server.
        world_size: how many ranks there are; None: as many as the first hello says, which says the next two too.
        on_failure: told of the first failure, from any thread.
        members, divisor: see ``Aggregator``.
        on_first_hello: told once, by the thread of the stream that said it. No hello is answered before it has returned.
        on_all_left: told when every rank has said goodbye.
    """

    def __init__(
        self,
        name: str,
        world_size: int | None,
        on_failure: OnFailure,
        on_first_hello: Callable[[Hello], None] = lambda hello: None,
        on_all_left: Callable[[], None] = lambda: None,
        members: Sequence[int] | None = None,
        divisor: int | None = None,
    ) -> None:
        #: Replies give way to who takes it: the pushes of a rank in the same process.
        self.right_of_way = RightOfWay()
        self._name = name
        self._on_failure = on_failure
        self._on_first_hello = on_first_hello
        self._on_all_left = on_all_left
        self._lock = threading.Lock()
        self._welcoming = threading.Event()  # hellos are answered
        self._aggregator = None if world_size is None else Aggregator(world_size, self.fail, members, divisor)
        self._workers: list[_Worker] = []
        self._greeted: set[int] = set()  # ranks that have or had a stream
        self._left: set[int] = set()
        self._failure: CommschedError | None = None
        self._closed = False

    @property
    def aggregator(self) -> Aggregator:
        """Where the averages are made; there is none before the world size is known."""
        assert self._aggregator is not None
        return self._aggregator

    def serve(self, stream: Stream) -> None:
        """Say and hear what is to be said until the stream ends; ``stream.outbox`` is finished then. The carrier's thread."""
        worker = _Worker(stream)
        with self._lock:
            if self._closed:
                return stream.outbox.abort()
            self._workers.append(worker)
        stream.outbox.give_way(self.right_of_way)
        try:
            self._hear(worker)
        except ConfigError as error:  # a stranger, or a worker of another job: not this job's failure
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
            stream.outbox.keep_way()
            with self._lock:
                self._workers.remove(worker)

    def fail(self, error: CommschedError) -> None:
        """End the job: the first failure is told to every worker, and to ``on_failure``. Any thread."""
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            workers = list(self._workers)
        self._welcoming.set()
        for worker in workers:
            _refuse(worker, error)
        self._on_failure(error)

    def close(self) -> None:
        """End every stream in good order. Idempotent; any thread, a stream's own too."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        self._welcoming.set()
        if self._aggregator is not None:
            self._aggregator.close()
        for worker in workers:
            worker.stream.outbox.put_control(Frame(Kind.GOODBYE))
            worker.stream.outbox.finish()

    # --- a stream's own thread ---

    def _hear(self, worker: _Worker) -> None:
        try:
            for frame in worker.stream.frames(lambda frame: self._place(worker, frame)):
                if frame.kind is Kind.PUSH and worker.rank is not None:
                    self._push(worker.rank, worker.stream, frame)
                elif frame.kind is Kind.GOODBYE and worker.rank is not None:
                    return self._goodbye(worker.rank)
                else:
                    self._handle(worker, frame)
                del frame  # its memory is used again, perhaps before the next message comes
        except ProtocolError as error:
            raise ProtocolError(f"{self._name} got from {worker}: {error}") from error
        except StreamBroken:
            pass  # what that means is the same as an end without goodbye
        if worker.rank is not None:
            raise PeerLost(f"rank {worker.member} is gone: its connection to {self._name} broke")

    def _place(self, worker: _Worker, frame: Frame) -> memoryview:
        if worker.rank is None or frame.kind is not Kind.PUSH:
            raise _out_of_turn(worker, frame)
        self.aggregator.require_fitting(worker.rank, frame.key, frame.dtype, frame.start, frame.stop)
        return self.aggregator.buffers.take(frame.stop - frame.start)

    def _push(self, rank: int, stream: Stream, frame: Frame) -> None:
        given = not memoryview(frame.payload).readonly  # it lies where ``_place`` said
        reply = _reply_to(stream, frame)
        self.aggregator.push(rank, frame.key, frame.dtype, frame.start, frame.stop, frame.payload, reply, given=given)

    def _handle(self, worker: _Worker, frame: Frame) -> None:
        if frame.kind is Kind.HELLO and worker.rank is None:
            self._greet(worker, Hello.from_record(frame.json()))
        elif worker.rank is None:
            raise _out_of_turn(worker, frame)
        elif frame.kind is Kind.GROUP:
            self.aggregator.add_group(worker.rank, frame.group, Manifest.from_record(frame.json()))
        elif frame.kind is Kind.LEFT:
            self.aggregator.leave(self._rank_in(frame))
        else:
            raise _out_of_turn(worker, frame)

    def _rank_in(self, frame: Frame) -> int:
        rank = frame.json()
        if type(rank) is not int or not 0 <= rank < self.aggregator.world_size:
            raise ProtocolError(f"{str(rank)[:20]!r} is not a rank")
        return rank

    def _greet(self, worker: _Worker, hello: Hello) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            first = not self._greeted
            if self._aggregator is None:
                self._aggregator = Aggregator(hello.world_size, self.fail, hello.members, hello.divisor)
            aggregator, world_size = self._aggregator, self._aggregator.world_size
            if hello.world_size != world_size:
                raise ConfigError(f"rank {hello.member} says there are {hello.world_size} ranks; this job has {world_size}")
            asked = (hello.members or tuple(range(world_size)), hello.divisor or world_size)
            if asked != (aggregator.members, aggregator.divisor):
                raise ConfigError(
                    f"rank {hello.member} says that the members are {asked[0]} of {asked[1]}; they are {aggregator.members} "
                    f"of {aggregator.divisor}"
                )
            if hello.rank in self._greeted:
                raise ConfigError(f"rank {hello.member} is connected already; two processes claim to be it")
            self._greeted.add(hello.rank)
            worker.rank, worker.member = hello.rank, aggregator.members[hello.rank]
        if first:
            self._on_first_hello(hello)
            self._welcoming.set()
        self._welcoming.wait()
        worker.stream.outbox.put_control(json_frame(Kind.HELLO, {}))

    def _goodbye(self, rank: int) -> None:
        self.aggregator.leave(rank)
        with self._lock:
            self._left.add(rank)
            all_left = len(self._left) == self.aggregator.world_size
        if all_left:
            self._on_all_left()


def _out_of_turn(worker: _Worker, frame: Frame) -> ProtocolError:
    return ProtocolError(f"{frame.kind.name} {'before the hello' if worker.rank is None else 'out of turn'}")


def _reply_to(stream: Stream, push: Frame) -> Reply:
    _, group, step, partition, dtype, start, stop, _, order = push

    def reply(result: memoryview) -> None:
        stream.outbox.put(Frame(Kind.RESULT, group, step, partition, dtype, start, stop, result, order))

    return reply


def _refuse(worker: _Worker, error: CommschedError) -> None:
    worker.stream.outbox.put_control(json_frame(Kind.ERROR, to_record(error)))
    worker.stream.outbox.finish()
