"""A member's end of the control channel, whatever carries its messages."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from ..core import timeouts
from ..core.errors import (
    ClosedError,
    CommschedError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    TransportError,
    UnsupportedError,
    encodable,
    error_text,
    from_record,
    ranks_text,
    to_record,
)
from ..core.interrupted import is_held_here
from . import messages
from .events import CallbackThread, Listener
from .messages import MAX_MESSAGE_BYTES, Member, Message, encode, ranks_in, to_json

log = logging.getLogger("commsched")

_WARN_AFTER_SECONDS = 10.0
_ANSWER_SECONDS = 1.0  # longest time that a warning waits for rank 0 to say which ranks are missing
_MAX_OF_AN_ERROR = 10_000  # most characters of a failure's message that are sent


_WAITED_FOR_BY_NOBODY = messages.Heartbeat | messages.FromRank | messages.Announced


class ControlEnd:
    """The calls of a member that has joined, and its part of the protocol. A subclass carries the messages: it defines
    :meth:`_put`, and calls :meth:`_received`.

    A failure anywhere in the job is passed once to the callbacks of :meth:`when_failed`. From then on every method that waits
    or sends raises it, but for ``report`` and ``close``. After ``close`` they raise ClosedError.

    Args:
        changed: guards this object; notified when something happens that a wait may be for.
        lazily: there is no thread for callbacks before the first one.
        part_after_seconds: time after which a rank that has left asks to end before the others; ``None`` means never.
        stall_after_seconds: a gather that takes this long ends the job; ``None`` means no limit.
    """

    #: Add this to this process's ``time.monotonic()`` to get rank 0's.
    clock_offset_seconds = 0.0

    def __init__(
        self,
        member: Member,
        changed: threading.Condition,
        *,
        lazily: bool = False,
        part_after_seconds: float | None = None,
        stall_after_seconds: float | None = None,
    ) -> None:
        self._member = member
        self._part_after_seconds = part_after_seconds
        self._stall_after_seconds = stall_after_seconds
        self._changed = changed  # guards all below
        self._rank_0: Member | None = None  # set once it has welcomed this member
        self._ended = False
        self._closed = False
        self._failure: CommschedError | None = None
        self._when_failed: list[Callable[[CommschedError], None]] | None = []  # None once they have been called
        self._listener: Listener | None = None
        self._early: list[Callable[[Listener], object]] = []  # what happened before there was a listener
        self._reported: CommschedError | None = None  # this member's failure, while the server's verdict is awaited
        self._reported_at = 0.0
        self._gathers: dict[str, list[str]] = {}  # tag: values received, in rank order
        self._missing: dict[str, list[int]] = {}  # tag: ranks that have yet to give a value, as rank 0 answered
        self._left: set[int] = set()
        self._turns = 0
        self._callbacks = CallbackThread(self.report, lazily)

    @property
    def interrupts(self) -> bool:
        """Whether the caller has interrupted its thread while that had a lock of the control channel; see
        ``core/interrupted.py``."""
        return is_held_here(self._changed) or self._callbacks.interrupts

    def _put(self, message: Message) -> None:
        """Send ``message`` to rank 0. Never blocks."""
        raise NotImplementedError

    # --- any thread; callbacks may call the methods that do not wait ---

    def listen(self, listener: Listener) -> None:
        """Notify ``listener`` of all events, those so far included; in a control thread, one call at a time. Called once."""
        with self._changed:
            self._listener = listener
            for call in self._early:
                self._callbacks.put(partial(call, listener))
            self._early.clear()

    def when_failed(self, callback: Callable[[CommschedError], None]) -> None:
        """Call ``callback`` with the first failure of the job, from a control thread, before the listener hears of it. If the
        job has failed already, call it now, from this thread. ``callback`` must not wait."""
        with self._changed:
            if self._when_failed is not None:
                self._when_failed.append(callback)
                return
        assert self._failure is not None
        callback(self._failure)

    @property
    def rank(self) -> int:
        """The number of this rank, or server."""
        return self._member.index

    @property
    def failure(self) -> CommschedError | None:
        """The first failure of the job, the same on every rank; None if there is none."""
        return self._failure

    def gather_next(self, value: Any, what: str = "") -> list[Any]:
        """:meth:`gather`, where every rank calls it for the same purposes in the same order. ``what`` states the purpose in
        errors."""
        message = self._gather_of(f"gather {self._turns + 1}" + (f", {encodable(what)}" if what else ""), value)
        self._turns += 1  # not if the value is refused: the other ranks still wait in this turn
        return self._give(message)

    def gather(self, tag: str, value: Any) -> list[Any]:
        """Return the JSON value of every rank, in rank order. Waits until every rank has called it with this ``tag``.

        Each tag is used once. Values that are equal may be one object.

        Raises:
            PeerLost: a rank left instead (the message names the rank and the tag), or a member is gone.
            UnsupportedError: ``value`` is longer than the control channel takes.
        """
        return self._give(self._gather_of(tag, value))

    def _gather_of(self, tag: str, value: Any) -> messages.Gather:
        message = messages.Gather(tag, json.dumps(value))
        self._require_short(message, f"'{tag}' would gather")
        return message

    def _give(self, message: messages.Gather) -> list[Any]:
        tag = message.tag
        with self._changed:
            self._check()
            if self._has_left:
                raise ClosedError(f"{self._member} has left and cannot gather '{tag}'")
            self._put(message)
            values = self._gathers.setdefault(tag, [])
            self._wait_until(
                lambda: len(values) == self._member.world_size,
                lambda: self._ask_missing(tag),
                f"gather '{tag}'",
                self._stall_after_seconds,
            )
            del self._gathers[tag]
            self._missing.pop(tag, None)
        parsed = {text: json.loads(text) for text in set(values)}
        return [parsed[text] for text in values]

    def report(self, error: BaseException) -> None:
        """Report a failure of this member to all members. Never blocks.

        The first failure in the job counts: it is the one passed to callbacks, and may be another than ``error``.
        """
        if not isinstance(error, CommschedError):
            text = f"user exception on {self._member}: {error_text(error)}"
            error = TransportError(text, **self._member.about)
        with self._changed:
            if self._is_over_for_all:  # no other member is left to notify
                self._failure = error
                self._callbacks.put(self._tell_failure)
            if self._reported is not None or self._over:
                return
            self._reported = error
            self._reported_at = time.monotonic()
            self._put(messages.ReportFailure(_record(error)))

    def report_and_wait(self, error: CommschedError) -> None:
        """Report ``error`` and wait, for a limited time, until the job's failure is decided. Otherwise other ranks might notice
        the closed connections of this one first and take them for the cause."""
        decided = threading.Event()
        self.when_failed(lambda _: decided.set())
        self.report(error)
        decided.wait(timeouts.RAISE_SECONDS)

    def leave(self) -> None:
        """Announce that this rank sends nothing more. Never blocks; idempotent."""
        with self._changed:
            if self._is_over_for_all:
                return
            self._check()
            if not self._has_left:
                self._left.add(self._member.index)
                self._put(messages.Leave())

    def wait_until_all_left(self) -> None:
        """Return when every rank has left; or, after ``part_after_seconds``, when no other rank waits for an average that this
        rank took part in. The other ranks may evaluate for long, or wait in one of their libraries for this process to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._over, self._part_after_seconds)
            if not self._over:
                self._put(messages.Part())
            self._wait_until(lambda: self._ended, self._not_left, "leave, or to have all their averages")

    def wait_for_callbacks(self) -> None:
        """Return when the listener has been called with all events received so far. The listener must not call this."""
        self._callbacks.wait()

    def propose(self, config: dict[str, Any], window: Mapping[str, Any] | None = None) -> None:
        """Propose that all ranks use ``config`` (JSON values) from an agreed step on. Each rank is notified by
        ``listener.switch_at``, with ``window``. Never blocks; the proposals of all ranks are handled one after another."""
        with self._changed:
            if self._is_over_for_all:
                return
            self._check()
            self._put(messages.Propose(config, dict(window or {})))

    def send_to_rank_0(self, topic: str, value: Any) -> None:
        """Send the JSON ``value`` about ``topic`` to rank 0, whose ``listener.on_message`` receives it. Rank 0 must not call
        it. Never blocks; the values of one rank arrive in order.

        Raises:
            UnsupportedError: ``value`` is longer than the control channel takes.
            ClosedError: this rank has left.
        """
        message = messages.ToRank0(topic, to_json(value))
        self._require_short(message, "a message to rank 0 would be")
        with self._changed:
            if self._is_over_for_all:
                return
            self._check()
            if self._has_left:
                raise ClosedError(f"{self._member} has left and cannot send to rank 0")
            self._put(message)

    def announce(self, topic: str, value: Any, to: Sequence[int] = ()) -> None:
        """Send the JSON ``value`` about ``topic`` to the other ranks in ``to``, or to all others if it is empty; not to those
        that have left. The ``listener.on_announced`` of each receives it. Only rank 0 may call it, even after it left. Never
        blocks; announced values arrive in order.

        Raises:
            UnsupportedError: ``value`` is longer than the control channel takes.
        """
        message = messages.Announce(topic, to_json(value), tuple(to))
        self._require_short(message, "an announcement would be")
        with self._changed:
            if self._is_over_for_all:
                return
            self._check()
            self._put(message)

    def close(self) -> None:
        """End the channel; the listener is not called afterwards. Idempotent; the listener may call it too.

        A member that closes before all ranks have left counts as lost for the others.
        """
        with self._changed:
            was_over, self._closed = self._over, True
            if not was_over:
                self._put(messages.Disconnect())
            self._changed.notify_all()
        self._disconnect()
        self._callbacks.close()

    def _disconnect(self) -> None:
        """End what carries the messages. Idempotent."""

    def _require_short(self, message: messages.Gather | messages.ToRank0 | messages.Announce, what: str) -> None:
        if len(message.value) < MAX_MESSAGE_BYTES // 4:  # the value is ASCII, and at most twice as long within the message
            return
        nbytes = len(encode(message))
        if nbytes > MAX_MESSAGE_BYTES:
            raise UnsupportedError(
                f"{what} {nbytes} bytes from {self._member}; the control channel takes at most "
                f"{MAX_MESSAGE_BYTES // 2**20} MiB of each rank"
            )

    # --- messages from rank 0 ---

    def _received(self, message: Message) -> None:
        """Handle ``message``. Called with the lock held."""
        if self._over:
            return
        self._handle(message)
        if not isinstance(message, _WAITED_FOR_BY_NOBODY):
            self._changed.notify_all()

    def _handle(self, message: Message) -> None:
        match message:
            case messages.Heartbeat():
                pass
            case messages.GatherPart(tag, runs):
                values = self._gathers.setdefault(tag, [])
                if len(values) + sum(number for number, _ in runs) > self._member.world_size:
                    self._fail(ProtocolError(f"rank 0 sent {self._member} more values of '{tag}' than there are ranks"))
                    return
                values.extend(value for number, value in runs for _ in range(number))
            case messages.Missing(tag, ranges):
                self._missing[tag] = ranks_in(ranges)
            case messages.Left(ranges):
                for rank in ranks_in(ranges):
                    if rank != self._member.index or not self._member.is_rank:
                        self._left.add(rank)
                        self._notify(methodcaller("on_leave", rank))
            case messages.Parting(rank):
                release = partial(self._put, messages.Released(rank))
                self._notify(lambda listener: listener.on_parting(rank, release))
            case messages.FromRank(rank, topic, value):
                self._notify(lambda listener: listener.on_message(rank, topic, json.loads(value)))
            case messages.Announced(topic, value):
                self._notify(lambda listener: listener.on_announced(topic, json.loads(value)))
            case messages.Prepare():
                self._notify(lambda listener: self._put(messages.Prepared(listener.hold_steps())))
            case messages.Commit(config, steps, window):
                self._notify(lambda listener: listener.switch_at(config, steps, window))
            case messages.End():
                self._ended = True
                self._finish()
                if not self._member.is_rank:
                    self._notify(lambda listener: listener.on_end())
            case messages.Failed(record):
                ours = self._reported
                self._fail(ours if ours is not None and record == _record(ours) else from_record(record))
            case _:
                self._fail(ProtocolError(f"rank 0 sent {self._member} {type(message).__name__}, which it may not send"))

    def _finish(self) -> None:
        """The job is over for this member, which sends nothing more. Called with the lock held."""

    # --- the callback thread ---

    def _tell_failure(self) -> None:
        failure = self._failure
        assert failure is not None
        with self._changed:
            callbacks, self._when_failed = self._when_failed or [], None
        for callback in callbacks:
            try:
                callback(failure)
            except Exception:  # the others, and who waits for averages, must hear of the failure in any case
                log.exception("%s: a callback of when_failed() failed itself", self._member)
        with self._changed:
            listener = self._listener
            if listener is None:
                self._early.append(lambda listener: listener.on_failure(failure))
        if listener is not None:
            listener.on_failure(failure)

    # --- with the lock held ---

    def _notify(self, call: Callable[[Listener], object]) -> None:
        listener = self._listener
        if listener is None:
            self._early.append(call)
        else:
            self._callbacks.put(partial(call, listener))

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

    def _fail(self, error: CommschedError) -> None:
        if self._over:
            return
        self._failure = error
        self._finish()
        self._changed.notify_all()
        self._callbacks.put(self._tell_failure)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._ended and not self._closed and not self._has_left:
            raise PeerLost(f"{self._rank_0} left, and {self._member} cannot go on without it", rank=0)
        if self._closed or self._ended:
            raise ClosedError("the control channel is closed")

    def _not_left(self) -> list[int]:
        return [rank for rank in range(self._member.world_size) if rank not in self._left]

    def _ask_missing(self, tag: str) -> list[int]:
        """Ask rank 0, which alone knows, for which ranks the gather ``tag`` waits. Empty if there is no answer."""
        self._missing.pop(tag, None)  # an answer that came too late
        self._put(messages.AskMissing(tag))
        all_there = self._member.world_size
        self._changed.wait_for(
            lambda: tag in self._missing or self._over or len(self._gathers[tag]) == all_there, _ANSWER_SECONDS
        )
        return self._missing.pop(tag, [])

    def _wait_until(
        self, condition: Callable[[], bool], not_there: Callable[[], list[int]], what: str, limit: float | None = None
    ) -> None:
        """Wait for ``condition``; warn every ``_WARN_AFTER_SECONDS`` about the ranks still missing.

        ``not_there``: returns the ranks that must be waited for, or none if it cannot; it may wait for a moment. ``limit``:
        seconds after which the job ends; ``None`` means no limit.
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
            missing = not_there()
            if condition() or self._over:
                continue
            ranks = ranks_text(missing) if missing else "other ranks"
            log.warning("%s has waited %.0f s for %s to %s", self._member, waited, ranks, what)
            warned = waited
            if limit is not None and waited >= limit:
                has = "has" if len(missing) == 1 else "have"
                stalled = f"{ranks} {has} not come to {what}; {self._member} has waited {waited:.0f} s for it, "
                lost = missing[0] if len(missing) == 1 else None
                self.report(PeerTimeout(f"{stalled}and stall_after is {limit:g} s", rank=lost))
                limit = None  # the verdict on what ended the job comes in a moment


def _record(error: CommschedError) -> dict[str, str]:
    record = to_record(error)
    return {**record, "message": record["message"][:_MAX_OF_AN_ERROR]}
