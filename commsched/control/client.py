"""A member's end of the control channel."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from ..core.errors import (
    ClosedError,
    CommschedError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    TransportError,
    UnsupportedError,
    from_record,
    to_record,
)
from ..version import __version__
from .callbacks import CallbackThread
from .clock import ClockOffset
from .direct_stream import DirectStream
from .listener import Listener
from .liveness import Liveness, tick_seconds, too_silent
from .member import Member
from .messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Announce,
    Announced,
    Beat,
    Bye,
    End,
    Failed,
    Give,
    Given,
    Held,
    Hello,
    Hold,
    Leave,
    Left,
    Message,
    Ping,
    Pong,
    Propose,
    Ready,
    Report,
    SwitchAt,
    Tell,
    Told,
    Welcome,
    decode,
    encode,
)
from .server import ControlServer
from .stream import Stream, refusal

__all__ = ["ControlClient", "Member"]

log = logging.getLogger("commsched")

_ROUND_TRIPS = 8  # to estimate the clock offset from
_VERDICT_SECONDS = 2.0  # how long to wait for the server to say which failure was the first
_WARN_AFTER_SECONDS = 10.0
_COMPACT = (",", ":")  # JSON without spaces
_MOST_OF_AN_ERROR = 10_000  # characters of a failure's message that travel


_WAITED_FOR_BY_NOBODY = Beat | Told | Announced


class ControlClient:
    """Joins a job, and is its member until :meth:`close`.

    The constructor returns when all ranks have joined. A failure, wherever in the job it arises, is told once to
    ``listener.on_failure`` and is raised by every wait here.

    Args:
        address: host:port of rank 0's ``ControlServer``.
        token: the job's secret.
        member: who this process is.
        listener: told what happens, unless the constructor raises; in a control thread, one call at a time.
        fail_after_seconds: silence after which rank 0 is given up; the same on every member.
        join_within_seconds: how long joining may take.
        server: for rank 0, whose process hosts it: messages to it and from it pass through no socket.

    Raises:
        ConfigError: the token is wrong, the world's size differs from rank 0's, or another process claims the same rank.
        ProtocolError: rank 0 runs another version.
        PeerTimeout: rank 0 was not reached, or ranks are missing (named), within ``join_within_seconds``.
        CommschedError: the job failed meanwhile.
    """

    def __init__(
        self,
        address: str,
        token: str,
        member: Member,
        listener: Listener,
        *,
        fail_after_seconds: float,
        join_within_seconds: float,
        server: ControlServer | None = None,
    ) -> None:
        self._address = address
        self._member = member
        self._listener = listener
        self._fail_after_seconds = fail_after_seconds
        self._join_within_seconds = join_within_seconds
        self._join_by = time.monotonic() + join_within_seconds

        self._changed = threading.Condition()  # guards all below
        self._rank_0: Member | None = None  # once it has welcomed us
        self._ready = False
        self._ended = False
        self._closed = False
        self._failure: CommschedError | None = None
        self._reported: CommschedError | None = None  # a failure here, while the server's verdict is awaited
        self._verdict_by = 0.0
        self._unreachable = "no answer"  # why rank 0 was not reached
        self._gathers: dict[str, dict[int, str]] = {}  # tag: the values that have come, by rank
        self._left: set[int] = set()
        self._clock = ClockOffset()
        self._liveness: Liveness[Member] = Liveness(fail_after_seconds, time.monotonic())

        self._callbacks = CallbackThread(self.report)
        self._watch = threading.Thread(target=self._tick, name="commsched-control-watch", daemon=True)
        events: Any = {"hello": self._hello, "on_data": self._received, "on_end": self._stream_ended}
        self._stream = (
            Stream(address, token, fail_after_seconds, **events)
            if server is None
            else DirectStream(server, fail_after_seconds, **events)
        )
        self._watch.start()
        self._stream.start()
        try:
            self._wait_until_joined()
        except BaseException:
            self.close()
            raise
        is_rank_0 = member.is_rank and member.index == 0
        #: What to add to this process's ``time.monotonic()`` to get rank 0's; estimated while joining. Rank 0's own process
        #: hosts the server: its clock is the very same.
        self.clock_offset_seconds = 0.0 if is_rank_0 else self._clock.seconds
        self._callbacks.start()  # only now: who is told of a failure by an exception is not called back too

    # --- any thread; the listener may call what does not wait ---

    def gather(self, tag: str, value: Any) -> list[Any]:
        """The JSON value of every rank, in rank order; waits until every rank has called it with this ``tag``.

        Tags are used once each.

        Raises:
            PeerLost: a rank left instead (the message names it and the tag), or a member is gone.
            UnsupportedError: ``value`` is longer than the control channel takes.
            CommschedError: the job failed meanwhile, or the client is closed.
        """
        data = self._encode(Give(tag, json.dumps(value)), f"'{tag}' would gather")
        with self._changed:
            self._check()
            if self._has_left:
                raise ClosedError(f"{self._member} has left and cannot gather '{tag}'")
            self._stream.put(data)
            values = self._gathers.setdefault(tag, {})
            self._wait_until(lambda: len(values) == self._member.world_size, values.keys, f"gather '{tag}'")
            del self._gathers[tag]
        return [json.loads(values[rank]) for rank in range(self._member.world_size)]

    def report(self, error: BaseException) -> None:
        """Tell everybody of a failure here. Never blocks.

        The first failure in the job counts: ``listener.on_failure`` is told of that one, which may be another.
        """
        if not isinstance(error, CommschedError):
            error = TransportError(f"user exception on {self._member}: {type(error).__name__}: {error}")
        with self._changed:
            if self._reported is not None or self._over:
                return
            self._reported = error
            self._verdict_by = time.monotonic() + _VERDICT_SECONDS
            self._stream.put(encode(Report(_record(error))))

    def leave(self) -> None:
        """Announce that this rank sends nothing more. Never blocks; idempotent.

        Raises:
            CommschedError: the job failed, or the client is closed.
        """
        with self._changed:
            self._check()
            if not self._has_left:
                self._left.add(self._member.index)
                self._stream.put(encode(Leave()))

    def wait_until_all_left(self) -> None:
        """Return when every rank has left.

        Raises:
            CommschedError: the job failed meanwhile, or the client is closed.
        """
        with self._changed:
            self._wait_until(lambda: self._ended, lambda: self._left, "leave")

    def propose(self, config: dict[str, Any]) -> None:
        """Ask that all ranks use ``config`` (JSON values) from a step on that they agree on; each is told of it by
        ``listener.switch_at``. Never blocks; the proposals of all ranks are handled one after another.

        Raises:
            CommschedError: the job failed, or the client is closed.
        """
        with self._changed:
            self._check()
            self._stream.put(encode(Propose(config)))

    def tell(self, value: Any) -> None:
        """Send the JSON ``value`` to rank 0, whose ``listener.on_told`` gets it; for the other ranks. Never blocks; what one
        rank tells arrives in order.

        Raises:
            UnsupportedError: ``value`` is longer than the control channel takes.
            CommschedError: this rank has left, the job failed, or the client is closed.
        """
        data = self._encode(Tell(json.dumps(value, separators=_COMPACT)), "to tell rank 0 would be")
        with self._changed:
            self._check()
            if self._has_left:
                raise ClosedError(f"{self._member} has left and cannot tell rank 0 anything")
            self._stream.put(data)

    def announce(self, value: Any) -> None:
        """Send the JSON ``value`` to every other rank that has not left, whose ``listener.on_announced`` gets it; for rank 0,
        even after it has left. Never blocks; what is announced arrives in order.

        Raises:
            UnsupportedError: ``value`` is longer than the control channel takes.
            CommschedError: the job failed, or the client is closed.
        """
        data = self._encode(Announce(json.dumps(value, separators=_COMPACT)), "to announce would be")
        with self._changed:
            if self._ended and not self._closed:
                return  # all have left
            self._check()
            self._stream.put(data)

    def close(self) -> None:
        """End threads and connection; the listener is not called afterwards. Idempotent; the listener may call it too.

        To the others, a member that closes before all ranks have left is lost.
        """
        with self._changed:
            if not self._over:
                self._stream.put(encode(Bye()))
            self._closed = True
            self._changed.notify_all()
        self._stream.close()
        self._watch.join()
        self._callbacks.close()

    def _encode(self, message: Message, what: str) -> bytes:
        data = encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise UnsupportedError(
                f"{what} {len(data)} bytes from {self._member}; the control channel takes at most "
                f"{MAX_MESSAGE_BYTES // 2**20} MiB of each rank"
            )
        return data

    # --- joining ---

    def _hello(self) -> bytes:
        return encode(Hello(__version__, PROTOCOL, self._member, max(0.0, self._join_by - time.monotonic())))

    def _wait_until_joined(self) -> None:
        def decided() -> bool:
            return self._failure is not None or (self._ready and self._clock.round_trips == _ROUND_TRIPS)

        with self._changed:
            self._changed.wait_for(decided, self._join_by - time.monotonic())
            if self._rank_0 is not None:  # its server knows who is missing, and says so
                self._changed.wait_for(decided, self._fail_after_seconds)
            if not decided():
                raise PeerTimeout(
                    f"{self._member} could not join rank 0 at {self._address} within {self._join_within_seconds:g} s: "
                    f"{self._unreachable}"
                )
            if self._failure is not None:
                raise self._failure

    # --- the stream's thread ---

    def _received(self, data: bytes) -> None:
        now = time.monotonic()
        try:
            message = decode(data)
        except ProtocolError as error:
            self.report(ProtocolError(f"rank 0 sent {self._member} {error}"))
            return
        with self._changed:
            if self._over:
                return
            if self._rank_0 is not None:
                self._liveness.heard(self._rank_0)
            self._handle(message, now)
            if not isinstance(message, _WAITED_FOR_BY_NOBODY):
                self._changed.notify_all()

    def _handle(self, message: Message, now: float) -> None:
        """Called with the lock held."""
        match message:
            case Beat():
                pass
            case Welcome(host, pid):
                self._rank_0 = Member("rank", 0, self._member.world_size, host, pid)
                self._stream.put(encode(Ping(time.monotonic())))
            case Pong(sent_at, server_time):
                self._clock.add(sent_at, server_time, now)
                if self._clock.round_trips < _ROUND_TRIPS:
                    self._stream.put(encode(Ping(time.monotonic())))
            case Ready():
                self._ready = True
            case Given(tag, rank, value):
                self._gathers.setdefault(tag, {})[rank] = value
            case Left(rank):
                self._left.add(rank)
                self._callbacks.put(lambda: self._listener.on_leave(rank))
            case Told(rank, value):
                self._callbacks.put(lambda: self._listener.on_told(rank, json.loads(value)))
            case Announced(value):
                self._callbacks.put(lambda: self._listener.on_announced(json.loads(value)))
            case Hold():
                self._callbacks.put(self._answer_hold)
            case SwitchAt(config, steps):
                self._callbacks.put(lambda: self._listener.switch_at(config, steps))
            case End():
                self._ended = True
                self._stream.finish()
                if not self._member.is_rank:
                    self._callbacks.put(self._listener.on_end)
            case Failed(record):
                ours = self._reported
                self._fail(ours if ours is not None and record == _record(ours) else from_record(record))
            case _:
                self._fail(ProtocolError(f"rank 0 sent {self._member} {type(message).__name__}, which is not its to send"))

    def _stream_ended(self, error: grpc.RpcError | None) -> bool:
        with self._changed:
            if self._over:
                return False
            if self._rank_0 is not None:
                lost = PeerLost(f"{self._rank_0} is gone: the control connection to it broke")
                # A lane that broke, or was ended by others, is likely the consequence of what ended rank 0.
                ours = self._reported
                self._fail(lost if ours is None or isinstance(ours, PeerLost) else ours)
                return False
            why = refusal(error, self._address)
            if why is not None:
                self._fail(why)
            elif error is not None:
                self._unreachable = error.details()
            return why is None

    # --- the watching thread ---

    def _tick(self) -> None:
        interval = tick_seconds(self._fail_after_seconds)
        with self._changed:
            while not self._changed.wait_for(lambda: self._over, interval):
                now = time.monotonic()
                for rank_0, silence in self._liveness.tick(now):
                    self._fail(self._reported or too_silent(str(rank_0), silence, self._fail_after_seconds))
                if self._reported is not None and now >= self._verdict_by:
                    self._fail(self._reported)

    # --- the callback thread ---

    def _answer_hold(self) -> None:
        steps = self._listener.hold_steps()
        self._stream.put(encode(Held(steps)))

    # --- with the lock held ---

    @property
    def _over(self) -> bool:
        return self._failure is not None or self._ended or self._closed

    @property
    def _has_left(self) -> bool:
        return self._member.index in self._left

    def _fail(self, error: CommschedError) -> None:
        if self._over:
            return
        self._failure = error
        self._stream.finish()
        self._changed.notify_all()
        self._callbacks.put(lambda: self._listener.on_failure(error))

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed or self._ended:
            raise ClosedError("the control channel is closed")

    def _wait_until(self, condition: Callable[[], bool], there: Callable[[], Iterable[int]], what: str) -> None:
        """``there``: the ranks that are not waited for; for the log."""
        began = time.monotonic()
        while not condition():
            self._check()
            if not self._changed.wait(_WARN_AFTER_SECONDS):
                missing = sorted(set(range(self._member.world_size)) - set(there()))
                waited = time.monotonic() - began
                log.warning("%s has waited %.0f s for ranks %s to %s", self._member, waited, missing, what)


def _record(error: CommschedError) -> dict[str, str]:
    record = to_record(error)
    return {"type": record["type"], "message": record["message"][:_MOST_OF_AN_ERROR]}
