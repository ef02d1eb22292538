"""A member's end of the control channel over a network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from ..core import timeouts
from ..core.errors import CommschedError, PeerLost, PeerTimeout, ProtocolError, TransportError
from ..core.interfaces import OnFailure
from ..net.rpc import Unproven, said_by
from ..net.tls import Identity
from ..version import __version__
from .end import ControlEnd
from .liveness import ClockOffset, FailureDetector, heartbeat_seconds, tick_seconds, too_silent
from .messages import PROTOCOL, End, Hello, Member, Message, Ping, Pong, Ready, Welcome, decode
from .server import ControlServer, InProcessStream
from .stream import ControlStream, refusal
from .witnessed import Doubts

_ROUND_TRIPS = 8  # round trips from which the clock offset is estimated


class ControlClient(ControlEnd):
    """Joins a job, and is its member until :meth:`close`.

    The constructor returns when all ranks have joined.

    Args:
        address: host:port of rank 0's ``ControlServer``.
        fail_after_seconds: silence after which rank 0 is given up; the same on every member.
        join_within_seconds: longest time that joining may take.
        waits: rank 0 may have yet to come up. Otherwise it has been there, and a refused connection means that it has ended.
        server: for rank 0 only, whose process hosts the server: their messages then pass through no socket.
        when_lost: called once, with a function that ends this membership with an error. It is for those who know sooner than
            this channel that the job cannot begin.
        identity: this process's; with one, the channel is encrypted.

    Raises:
        ConfigError: the token is wrong, rank 0 does not prove the token or serves another job, the world size differs from
            rank 0's, or another process claims the same rank.
        ProtocolError: rank 0 runs another version.
        PeerLost: rank 0 has ended, and this member does not wait for it.
        PeerTimeout: rank 0 was not reached, or ranks are missing (named), within ``join_within_seconds``.
        CommschedError: the job failed meanwhile.
    """

    def __init__(
        self,
        address: str,
        token: str,
        member: Member,
        *,
        fail_after_seconds: float,
        join_within_seconds: float,
        stall_after_seconds: float | None = None,
        server: ControlServer | None = None,
        job: str = "",
        identity: Identity | None = None,
        waits: bool = True,
        when_lost: Callable[[OnFailure], object] = lambda lost: None,
    ) -> None:
        super().__init__(
            member,
            threading.Condition(),
            part_after_seconds=fail_after_seconds,
            stall_after_seconds=stall_after_seconds,
        )
        self._address = address
        self._waits = waits
        self._fail_after_seconds = fail_after_seconds
        self._beat_seconds = heartbeat_seconds(fail_after_seconds, member.world_size)
        self._join_within_seconds = join_within_seconds
        self._join_by = time.monotonic() + join_within_seconds

        # Guarded by ``_changed``:
        self._witness_of_rank_0 = ""
        self._heard_at = 0.0  # when rank 0 was last heard, by this process's clock
        self._ready = False
        self._unreachable = "no answer"  # why rank 0 was not reached
        self._turned_away = False  # refused by a job that is about to end
        self._clock = ClockOffset()
        self._liveness: FailureDetector[Member] = FailureDetector(fail_after_seconds, time.monotonic(), member.world_size)

        self._doubts: Doubts[Member] = Doubts(fail_after_seconds, self._rank_0_runs)
        self._watch = threading.Thread(target=self._tick, name="commsched-control-watch", daemon=True)
        ends: Any = {"hello": self._hello, "on_end": self._stream_ended}
        self._stream = (
            ControlStream(
                address, token, job, fail_after_seconds, self._beat_seconds, on_data=self._on_data, identity=identity, **ends
            )
            if server is None
            else InProcessStream(server, on_message=self._on_message, **ends)
        )
        try:
            self._watch.start()
            self._stream.start()
            when_lost(self._lost)
            self._wait_until_joined()
            is_rank_0 = member.is_rank and member.index == 0
            # Estimated while joining. Rank 0's process hosts the server, so that both use the same clock.
            self.clock_offset_seconds = 0.0 if is_rank_0 else self._clock.seconds
            self._callbacks.start()
        except BaseException:  # also if no thread can be started
            self.close()
            raise

    def _put(self, message: Message) -> None:
        self._stream.put(message)

    def _finish(self) -> None:
        self._stream.finish()

    def _disconnect(self) -> None:
        self._stream.close()
        self._doubts.close()
        if self._watch.ident is not None:  # it was started
            self._watch.join()

    def _lost(self, error: CommschedError) -> None:
        with self._changed:
            self._fail(error)

    # --- joining ---

    def _hello(self) -> Message:
        return Hello(__version__, PROTOCOL, self._member, max(0.0, self._join_by - time.monotonic()))

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

    def _on_data(self, data: bytes) -> None:
        try:
            message = decode(data)
        except ProtocolError as error:
            self.report(ProtocolError(f"rank 0 sent {self._member} {error}"))
            return
        self._on_message(message)

    def _on_message(self, message: Message) -> None:
        now = time.monotonic()
        with self._changed:
            if self._rank_0 is not None:
                self._heard_at = now
                self._liveness.heard(self._rank_0)
            self._received(message)

    def _handle(self, message: Message) -> None:
        match message:
            case Welcome(host, pid):
                self._rank_0 = Member("rank", 0, self._member.world_size, host, pid)
                self._put(Ping(time.monotonic()))
            case Pong(sent_at, server_time):
                self._clock.add(sent_at, server_time, self._heard_at)
                if self._clock.round_trips < _ROUND_TRIPS:
                    self._put(Ping(time.monotonic()))
            case Ready(witness):
                self._witness_of_rank_0 = witness
                self._ready = True
            case End() if self._rank_0 is None:  # from an earlier session, whose rank 0 still has this address
                self._unreachable, self._turned_away = "the job that listens there is about to end", True
                self._stream.finish()
            case _:
                super()._handle(message)

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
            if why is None and isinstance(error, grpc.RpcError):
                self._unreachable = said_by(error)
                if not self._waits and "Connection refused" in self._unreachable:
                    why = PeerLost(f"rank 0 is gone: nobody listens at {self._address} any more", rank=0)
            if why is not None:
                self._fail(why)
            return why is None

    # --- the watching thread ---

    def _tick(self) -> None:
        interval = tick_seconds(self._fail_after_seconds, self._member.world_size)
        with self._changed:
            while not self._changed.wait_for(lambda: self._over, interval):
                now = time.monotonic()
                for rank_0, silence in self._liveness.tick(now):
                    self._rank_0_gone(too_silent(rank_0, silence, self._fail_after_seconds))
                for rank_0 in self._liveness.doubtful():
                    self._doubts.ask(rank_0, str(rank_0), self._witness_of_rank_0)
                if (
                    self._reported is not None
                    and now >= self._reported_at + timeouts.VERDICT_SECONDS
                    and not self._may_be_of_rank_0(self._reported)
                ):
                    self._fail(self._reported)

    def _rank_0_runs(self, rank_0: Member) -> None:
        """Rank 0's witness reported that rank 0 runs. Called from the thread that asked the witness."""
        with self._changed:
            self._liveness.heard(rank_0)

    # --- with the lock held ---

    def _rank_0_gone(self, error: CommschedError) -> None:
        """Fail with ``error``, or with this member's own reported failure unless that is a ``PeerLost``: a lane that broke, or
        that other ranks closed, is likely a consequence of whatever ended rank 0."""
        ours = self._reported
        self._fail(error if ours is None or isinstance(ours, PeerLost) else ours)

    def _may_be_of_rank_0(self, ours: CommschedError) -> bool:
        """Whether ``ours`` may be a consequence of rank 0's silence: the first rank that gives up a frozen rank 0 ends, and its
        lanes to the other ranks break."""
        silence = time.monotonic() - self._heard_at
        return isinstance(ours, PeerLost) and silence > 2 * self._beat_seconds
