"""A member's end of the control channel."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from ..core import timeouts
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
from ..net.rpc import Unproven
from ..version import __version__
from .clock import ClockOffset
from .direct_stream import InProcessStream
from .events import CallbackThread, Listener
from .liveness import FailureDetector, heartbeat_seconds, tick_seconds, too_silent
from .member import Member
from .messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Announce,
    Announced,
    Commit,
    Disconnect,
    End,
    Failed,
    FromRank,
    Gather,
    GatherPart,
    Heartbeat,
    Hello,
    Leave,
    Left,
    Message,
    Part,
    Parting,
    Ping,
    Pong,
    Prepare,
    Prepared,
    Propose,
    Ready,
    Released,
    ReportFailure,
    ToRank0,
    Welcome,
    decode,
    encode,
)
from .server import ControlServer
from .stream import ControlStream, refusal
from .witnessed import Doubts

__all__ = ["ControlClient", "Member"]

log = logging.getLogger("commsched")

_ROUND_TRIPS = 8  # round trips from which the clock offset is estimated
_WARN_AFTER_SECONDS = 10.0
_COMPACT = (",", ":")  # JSON without spaces
_MAX_OF_AN_ERROR = 10_000  # most characters of a failure's message that are sent


_WAITED_FOR_BY_NOBODY = Heartbeat | FromRank | Announced


class ControlClient:
    """Joins a job, and is its member until :meth:`close`.

    The constructor returns when all ranks have joined. A failure anywhere in the job is passed once to
    ``listener.on_failure`` and is raised by every wait here.

    Args:
        address: host:port of rank 0's ``ControlServer``.
        token: the job's secret.
        member: identity of this process.
        listener: notified of events, unless the constructor raises; in a control thread, one call at a time.
        fail_after_seconds: silence after which rank 0 is given up; the same on every member.
        join_within_seconds: longest time that joining may take.
        stall_after_seconds: a gather that takes this long ends the job; ``None`` means no limit.
        server: for rank 0 only, whose process hosts the server: their messages then pass through no socket.
        job: the job's name; rank 0 refuses a member of another job.

    Raises:
        ConfigError: the token is wrong, rank 0 does not prove the token or serves another job, the world size differs from
            rank 0's, or another process claims the same rank.
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
        stall_after_seconds: float | None = None,
        server: ControlServer | None = None,
        job: str = "",
    ) -> None:
        self._address = address
        self._member = member
        self._listener = listener
        self._fail_after_seconds = fail_after_seconds
        self._join_within_seconds = join_within_seconds
        self._stall_after_seconds = stall_after_seconds
        self._join_by = time.monotonic() + join_within_seconds

        self._changed = threading.Condition()  # guards all below
        self._rank_0: Member | None = None  # set once it has welcomed this member
        self._witness_of_rank_0 = ""
        self._heard_at = 0.0  # when rank 0 was last heard, by this process's clock
        self._ready = False
        self._ended = False
        self._closed = False
        self._failure: CommschedError | None = None
        self._reported: CommschedError | None = None  # this member's failure, while the server's verdict is awaited
        self._verdict_by = 0.0
        self._unreachable = "no answer"  # why rank 0 was not reached
        self._turned_away = False  # refused by a job that is about to end
        self._gathers: dict[str, dict[int, str]] = {}  # tag: values received, by rank
        self._left: set[int] = set()
        self._clock = ClockOffset()
        self._liveness: FailureDetector[Member] = FailureDetector(fail_after_seconds, time.monotonic())

        self._callbacks = CallbackThread(self.report)
        self._doubts: Doubts[Member] = Doubts(fail_after_seconds, self._rank_0_runs)
        self._watch = threading.Thread(target=self._tick, name="commsched-control-watch", daemon=True)
        events: Any = {"hello": self._hello, "on_data": self._received, "on_end": self._stream_ended}
        self._stream = (
            ControlStream(address, token, job, fail_after_seconds, **events)
            if server is None
            else InProcessStream(server, fail_after_seconds, **events)
        )
        try:
            self._watch.start()
            self._stream.start()
            self._wait_until_joined()
            is_rank_0 = member.is_rank and member.index == 0
            #: Add this to this process's ``time.monotonic()`` to get rank 0's; estimated while joining. It is 0 on rank 0,
            #: whose process hosts the server, so that both use the same clock.
            self.clock_offset_seconds = 0.0 if is_rank_0 else self._clock.seconds
            self._callbacks.start()  # only now: a failure that the constructor raises is not passed to the listener too
        except BaseException:  # also if no thread can be started
            self.close()
            raise

    # --- any thread; the listener may call the methods that do not wait ---

    def gather(self, tag: str, value: Any) -> list[Any]:
        """Return the JSON value of every rank, in rank order. Waits until every rank has called it with this ``tag``.

        Each tag is used once.

        Raises:
            PeerLost: a rank left instead (the message names the rank and the tag), or a member is gone.
            UnsupportedError: ``value`` is longer than the control channel takes.
            CommschedError: the job failed meanwhile, or the client is closed.
        """
        data = self._encode(Gather(tag, json.dumps(value)), f"'{tag}' would gather")
        with self._changed:
            self._check()
            if self._has_left:
                raise ClosedError(f"{self._member} has left and cannot gather '{tag}'")
            self._stream.put(data)
            values = self._gathers.setdefault(tag, {})
            self._wait_until(
                lambda: len(values) == self._member.world_size, values.keys, f"gather '{tag}'", self._stall_after_seconds
            )
            del self._gathers[tag]
        return [json.loads(values[rank]) for rank in range(self._member.world_size)]

    def report(self, error: BaseException) -> None:
        """Report a failure of this member to all members. Never blocks.

        The first failure in the job counts: it is the one passed to ``listener.on_failure``, and may be another than ``error``.
        """
        if not isinstance(error, CommschedError):
            text = f"user exception on {self._member}: {type(error).__name__}: {error}"
            error = TransportError(text, **self._member.about)
        with self._changed:
            if self._is_over_for_all:  # no other member is left to notify
                self._failure = error
                self._callbacks.put(lambda: self._listener.on_failure(error))
            if self._reported is not None or self._over:
                return
            self._reported = error
            self._verdict_by = time.monotonic() + timeouts.VERDICT_SECONDS
            self._stream.put(encode(ReportFailure(_record(error))))

    def leave(self) -> None:
        """Announce that this rank sends nothing more. Never blocks; idempotent.

        Raises:
            CommschedError: the job failed, or the client is closed.
        """
        with self._changed:
            if self._is_over_for_all:
                return
            self._check()
            if not self._has_left:
                self._left.add(self._member.index)
                self._stream.put(encode(Leave()))

    def wait_until_all_left(self) -> None:
        """Return when every rank has left; or, after ``fail_after_seconds``, when no other rank waits for an average that this
        rank took part in. The other ranks may evaluate for long, or wait in one of their libraries for this process to end.

        Raises:
            CommschedError: the job failed meanwhile, or the client is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over, self._fail_after_seconds)
            if not self._over:
                self._stream.put(encode(Part()))
            self._wait_until(lambda: self._ended, lambda: self._left, "leave, or to have all their averages")

    def wait_for_callbacks(self) -> None:
        """Return when the listener has been called with all events received so far. The listener must not call this."""
        self._callbacks.wait()

    def propose(self, config: dict[str, Any]) -> None:
        """Propose that all ranks use ``config`` (JSON values) from an agreed step on. Each rank is notified by
        ``listener.switch_at``. Never blocks; the proposals of all ranks are handled one after another.

        Raises:
            CommschedError: the job failed, or the client is closed.
        """
        with self._changed:
            if self._is_over_for_all:
                return
            self._check()
            self._stream.put(encode(Propose(config)))

    def send_to_rank_0(self, value: Any) -> None:
        """Send the JSON ``value`` to rank 0, whose ``listener.on_message`` receives it. Rank 0 must not call it. Never blocks;
        the values of one rank arrive in order.

        Raises:
            UnsupportedError: ``value`` is longer than the control channel takes.
            CommschedError: this rank has left, the job failed, or the client is closed.
        """
        data = self._encode(ToRank0(json.dumps(value, separators=_COMPACT)), "a message to rank 0 would be")
        with self._changed:
            if self._is_over_for_all:
                return
            self._check()
            if self._has_left:
                raise ClosedError(f"{self._member} has left and cannot send to rank 0")
            self._stream.put(data)

    def announce(self, value: Any) -> None:
        """Send the JSON ``value`` to every other rank that has not left; its ``listener.on_announced`` receives it. Only rank 0
        may call it, even after it has left. Never blocks; announced values arrive in order.

        Raises:
            UnsupportedError: ``value`` is longer than the control channel takes.
            CommschedError: the job failed, or the client is closed.
        """
        data = self._encode(Announce(json.dumps(value, separators=_COMPACT)), "an announcement would be")
        with self._changed:
            if self._is_over_for_all:
                return
            self._check()
            self._stream.put(data)

    def close(self) -> None:
        """End the threads and the connection; the listener is not called afterwards. Idempotent; the listener may call it too.

        A member that closes before all ranks have left counts as lost for the others.
        """
        with self._changed:
            if not self._over:
                self._stream.put(encode(Disconnect()))
            self._closed = True
            self._changed.notify_all()
        self._stream.close()
        self._doubts.close()
        if self._watch.ident is not None:  # it was started
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
            if self._rank_0 is not None:  # rank 0's server knows which ranks are missing, and reports them
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
                self._heard_at = now
                self._liveness.heard(self._rank_0)
            self._handle(message, now)
            if not isinstance(message, _WAITED_FOR_BY_NOBODY):
                self._changed.notify_all()

    def _handle(self, message: Message, now: float) -> None:
        """Called with the lock held."""
        match message:
            case Heartbeat():
                pass
            case Welcome(host, pid):
                self._rank_0 = Member("rank", 0, self._member.world_size, host, pid)
                self._stream.put(encode(Ping(time.monotonic())))
            case Pong(sent_at, server_time):
                self._clock.add(sent_at, server_time, now)
                if self._clock.round_trips < _ROUND_TRIPS:
                    self._stream.put(encode(Ping(time.monotonic())))
            case Ready(witness):
                self._witness_of_rank_0 = witness
                self._ready = True
            case GatherPart(tag, rank, value):
                self._gathers.setdefault(tag, {})[rank] = value
            case Left(rank):
                self._left.add(rank)
                self._callbacks.put(lambda: self._listener.on_leave(rank))
            case Parting(rank):
                self._callbacks.put(lambda: self._listener.on_parting(rank, lambda: self._release(rank)))
            case FromRank(rank, value):
                self._callbacks.put(lambda: self._listener.on_message(rank, json.loads(value)))
            case Announced(value):
                self._callbacks.put(lambda: self._listener.on_announced(json.loads(value)))
            case Prepare():
                self._callbacks.put(self._answer_hold)
            case Commit(config, steps):
                self._callbacks.put(lambda: self._listener.switch_at(config, steps))
            case End() if self._rank_0 is None:  # from an earlier session, whose rank 0 still has this address
                self._unreachable, self._turned_away = "the job that listens there is about to end", True
                self._stream.finish()
            case End():
                self._ended = True
                self._stream.finish()
                if not self._member.is_rank:
                    self._callbacks.put(self._listener.on_end)
            case Failed(record):
                ours = self._reported
                self._fail(ours if ours is not None and record == _record(ours) else from_record(record))
            case _:
                self._fail(ProtocolError(f"rank 0 sent {self._member} {type(message).__name__}, which it may not send"))

    def _stream_ended(self, error: grpc.RpcError | Unproven | RuntimeError | None) -> bool:
        with self._changed:
            if self._over:
                return False
            if self._rank_0 is not None and isinstance(error, RuntimeError):  # rank 0 is not to blame
                self._fail(TransportError(f"{self._member} cannot read the control channel: {error}"))
                return False
            if self._rank_0 is not None:
                self._rank_0_gone(PeerLost(f"{self._rank_0} is gone: the control connection to it broke", rank=0))
                return False
            if self._turned_away:
                self._turned_away = False
                return True
            why = refusal(error, self._address)
            if why is not None:
                self._fail(why)
            elif isinstance(error, grpc.RpcError):
                self._unreachable = error.details()
            return why is None

    # --- the watching thread ---

    def _tick(self) -> None:
        interval = tick_seconds(self._fail_after_seconds)
        with self._changed:
            while not self._changed.wait_for(lambda: self._over, interval):
                now = time.monotonic()
                for rank_0, silence in self._liveness.tick(now):
                    self._rank_0_gone(too_silent(rank_0, silence, self._fail_after_seconds))
                for rank_0 in self._liveness.doubtful():
                    self._doubts.ask(rank_0, str(rank_0), self._witness_of_rank_0)
                if self._reported is not None and now >= self._verdict_by and not self._may_be_of_rank_0(self._reported):
                    self._fail(self._reported)

    def _rank_0_runs(self, rank_0: Member) -> None:
        """Rank 0's witness reported that rank 0 runs. Called from the thread that asked the witness."""
        with self._changed:
            self._liveness.heard(rank_0)

    # --- the callback thread ---

    def _release(self, rank: int) -> None:
        """Any thread; never blocks."""
        self._stream.put(encode(Released(rank)))

    def _answer_hold(self) -> None:
        steps = self._listener.hold_steps()
        self._stream.put(encode(Prepared(steps)))

    # --- with the lock held ---

    @property
    def _over(self) -> bool:
        return self._failure is not None or self._ended or self._closed

    @property
    def _is_over_for_all(self) -> bool:
        """Whether all ranks have left, or rank 0 has ended: then there is nothing to send, and no member to send it to."""
        return self._ended and not self._closed and self._failure is None

    @property
    def _has_left(self) -> bool:
        return self._member.index in self._left

    def _rank_0_gone(self, error: CommschedError) -> None:
        """Fail with ``error``, or with this member's own reported failure unless that is a ``PeerLost``: a lane that broke, or
        that other ranks closed, is likely a consequence of whatever ended rank 0."""
        ours = self._reported
        self._fail(error if ours is None or isinstance(ours, PeerLost) else ours)

    def _may_be_of_rank_0(self, ours: CommschedError) -> bool:
        """Whether ``ours`` may be a consequence of rank 0's silence: the first rank that gives up a frozen rank 0 ends, and its
        lanes to the other ranks break."""
        silence = time.monotonic() - self._heard_at
        return isinstance(ours, PeerLost) and silence > 2 * heartbeat_seconds(self._fail_after_seconds)

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
        if self._ended and not self._closed and not self._has_left:
            raise PeerLost(f"{self._rank_0} left, and {self._member} cannot go on without it", rank=0)
        if self._closed or self._ended:
            raise ClosedError("the control channel is closed")

    def _wait_until(
        self, condition: Callable[[], bool], there: Callable[[], Iterable[int]], what: str, limit: float | None = None
    ) -> None:
        """Wait for ``condition``; warn every ``_WARN_AFTER_SECONDS`` about the ranks still missing.

        ``there``: the ranks that need not be waited for any more. ``limit``: seconds after which the job ends; ``None`` means
        no limit.
        """
        began = time.monotonic()
        warned = 0.0
        while not condition():
            self._check()
            waited = time.monotonic() - began
            due = min(warned + _WARN_AFTER_SECONDS, math.inf if limit is None else limit)
            if waited < due:
                self._changed.wait(due - waited)
                continue
            missing = sorted(set(range(self._member.world_size)) - set(there()))
            ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            log.warning("%s has waited %.0f s for %s to %s", self._member, waited, ranks, what)
            warned = waited
            if limit is not None and waited >= limit:
                has = "has" if len(missing) == 1 else "have"
                stalled = f"{ranks} {has} not come to {what}; {self._member} has waited {waited:.0f} s for it, "
                self.report(PeerTimeout(f"{stalled}and stall_after is {limit:g} s"))
                limit = None  # the verdict on what ended the job comes in a moment


def _record(error: CommschedError) -> dict[str, str]:
    record = to_record(error)
    return {**record, "message": record["message"][:_MAX_OF_AN_ERROR]}
