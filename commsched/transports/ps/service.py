"""The protocol of a parameter server: what each stream may say, around one Aggregator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import grpc

from ...core.errors import CommschedError, ConfigError, PeerLost, ProtocolError, TransportError, to_record
from ...core.manifest import Manifest
from ...core.ports import OnFailure
from ..aggregator import Aggregator, Key
from .frame import Frame, Kind, decode, encode_header, json_frame
from .hello import Hello
from .outbox import Outbox
from .pacer import Pacer

log = logging.getLogger("commsched")


@dataclass(eq=False)
class _Stream:
    """One connection. ``rank`` is None until its hello was accepted."""

    peer: str
    outbox: Outbox
    rank: int | None = None
    reader: threading.Thread | None = None

    def __str__(self) -> str:
        return self.peer if self.rank is None else f"rank {self.rank} ({self.peer})"


class Service:
    """Serves one job: accepts one stream per rank, and fails as a whole when one of them breaks.

    Args:
        name: what messages call this server.
        world_size: how many ranks there are; None: as many as the first hello says.
        pacer: caps what is sent, if given.
        on_failure: told of the first failure, from any thread.
        on_first_hello: told once, by the thread of the stream that said it. No hello is answered before it has returned.
        on_all_left: told when every rank has said goodbye.
    """

    def __init__(
        self,
        name: str,
        world_size: int | None,
        pacer: Pacer | None,
        on_failure: OnFailure,
        on_first_hello: Callable[[Hello], None] = lambda hello: None,
        on_all_left: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._pacer = pacer
        self._on_failure = on_failure
        self._on_first_hello = on_first_hello
        self._on_all_left = on_all_left
        self._lock = threading.Lock()
        self._welcoming = threading.Event()  # hellos are answered
        self._aggregator = None if world_size is None else self._make_aggregator(world_size)
        self._streams: list[_Stream] = []
        self._greeted: set[int] = set()  # ranks that have or had a stream
        self._left: set[int] = set()
        self._failure: CommschedError | None = None
        self._closed = False

    @property
    def aggregator(self) -> Aggregator:
        """Where the averages are made; there is none before the world size is known."""
        assert self._aggregator is not None
        return self._aggregator

    def exchange(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The handler of a stream: gRPC sends what the iterator returned gives, while a thread of ours reads."""
        outbox = Outbox(self._pacer)
        stream = _Stream(context.peer(), outbox)
        stream.reader = threading.Thread(target=self._read, args=(stream, requests), name="commsched-ps-reader", daemon=True)
        with self._lock:
            accepted = not self._closed
            if accepted:
                self._streams = [other for other in self._streams if other.reader is not None and other.reader.is_alive()]
                self._streams.append(stream)
                stream.reader.start()
        if not accepted or not context.add_callback(outbox.abort):
            outbox.abort()
        return outbox

    def fail(self, error: CommschedError) -> None:
        """End the job: the first failure is told to every worker, and to ``on_failure``. Any thread."""
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            streams = list(self._streams)
        self._welcoming.set()
        for stream in streams:
            _refuse(stream, error)
        self._on_failure(error)

    def close(self) -> None:
        """End every stream in good order. Idempotent; any thread, a stream's own too."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        self._welcoming.set()
        if self._aggregator is not None:
            self._aggregator.close()
        for stream in streams:
            stream.outbox.put_control(Frame(Kind.GOODBYE))
            stream.outbox.finish()

    def join_readers(self) -> None:
        """Return when no thread of a stream is left but the caller's; the streams must have ended."""
        with self._lock:
            readers = [stream.reader for stream in self._streams]
        for reader in readers:
            if reader is not None and reader is not threading.current_thread():
                reader.join()

    # --- a stream's own thread ---

    def _read(self, stream: _Stream, requests: Iterator[bytes]) -> None:
        try:
            self._serve(stream, requests)
        except ConfigError as error:  # a stranger, or a worker of another job: not this job's failure
            log.warning("%s refused %s: %s", self._name, stream, error)
            _refuse(stream, error)
        except CommschedError as error:
            _refuse(stream, error)
            self.fail(error)
        except Exception as error:
            log.exception("%s failed", self._name)
            self.fail(TransportError(f"{self._name} failed: {type(error).__name__}: {error}"))
        finally:
            stream.outbox.finish()

    def _serve(self, stream: _Stream, requests: Iterator[bytes]) -> None:
        try:
            for message in requests:
                try:
                    frame = decode(message)
                    if frame.kind is Kind.GOODBYE and stream.rank is not None:
                        return self._goodbye(stream.rank)
                    self._handle(stream, frame)
                except ProtocolError as error:
                    raise ProtocolError(f"{self._name} got from {stream}: {error}") from error
        except grpc.RpcError:
            pass  # it broke; what that means is the same as an end without goodbye
        if stream.rank is not None:
            raise PeerLost(f"rank {stream.rank} is gone: its connection to {self._name} broke")

    def _handle(self, stream: _Stream, frame: Frame) -> None:
        if frame.kind is Kind.HELLO and stream.rank is None:
            self._greet(stream, Hello.from_record(frame.json()))
        elif stream.rank is None:
            raise ProtocolError(f"{frame.kind.name} before the hello")
        elif frame.kind is Kind.PUSH:
            # Before the push: when it is the last, the reply is queued at once, and no ack may come after it.
            stream.outbox.put_control(Frame(Kind.ACK, frame.group, frame.step, frame.partition))
            reply = partial(_reply, stream.outbox, frame.order)
            self.aggregator.push(stream.rank, frame.key, frame.dtype, frame.start, frame.stop, frame.payload, reply)
        elif frame.kind is Kind.GROUP:
            self.aggregator.add_group(stream.rank, frame.group, Manifest.from_record(frame.json()))
        elif frame.kind is Kind.LEFT:
            self.aggregator.leave(self._rank_in(frame))
        else:
            raise ProtocolError(f"{frame.kind.name} out of turn")

    def _rank_in(self, frame: Frame) -> int:
        rank = frame.json()
        if type(rank) is not int or not 0 <= rank < self.aggregator.world_size:
            raise ProtocolError(f"{str(rank)[:20]!r} is not a rank")
        return rank

    def _greet(self, stream: _Stream, hello: Hello) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            first = not self._greeted
            if self._aggregator is None:
                self._aggregator = self._make_aggregator(hello.world_size)
            world_size = self._aggregator.world_size
            if hello.world_size != world_size:
                raise ConfigError(f"rank {hello.rank} says there are {hello.world_size} ranks; this job has {world_size}")
            if hello.rank in self._greeted:
                raise ConfigError(f"rank {hello.rank} is connected already; two processes claim to be it")
            self._greeted.add(hello.rank)
            stream.rank = hello.rank
        if first:
            self._on_first_hello(hello)
            self._welcoming.set()
        self._welcoming.wait()
        stream.outbox.put_control(json_frame(Kind.HELLO, {}))

    def _goodbye(self, rank: int) -> None:
        self.aggregator.leave(rank)
        with self._lock:
            self._left.add(rank)
            all_left = len(self._left) == self.aggregator.world_size
        if all_left:
            self._on_all_left()

    def _make_aggregator(self, world_size: int) -> Aggregator:
        return Aggregator(world_size, self.fail, _result_header)


def _result_header(key: Key, dtype: str, start: int, stop: int) -> bytes:
    return encode_header(Frame(Kind.RESULT, key.group, key.step, key.partition, dtype, start, stop))


def _reply(outbox: Outbox, order: int, message: bytes) -> None:
    outbox.put(order, len(message), lambda: message)


def _refuse(stream: _Stream, error: CommschedError) -> None:
    stream.outbox.put_control(json_frame(Kind.ERROR, to_record(error)))
    stream.outbox.finish()
