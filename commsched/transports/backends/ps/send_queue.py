"""The messages that wait to be sent to one peer, in the order in which they should leave, and what they wait for: each
other, and an optional cap on the sending rate of the process, which is an emulated link that all its streams share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic

from ....core.policies import make_policy
from ....core.scheduler import Scheduler
from .frame import Frame, FrameKind
from .right_of_way import GroupStep, RightOfWay

#: Added to the order of replies of a step for the pacer. It is larger than the order of every push.
_REPLIES_LAST = 2**32


@dataclass(slots=True, eq=False)
class OutgoingFrame:
    """A message to send. If ``sent`` is given, the sender calls it once, when the bytes have left and before an answer to the
    message is handled. ``step`` is that of the averages which the message is about: a row of norms is about another group."""

    frame: Frame
    sent: Callable[[], None] | None = None
    step: GroupStep = (0, 0)


#: The order of a message, its number of arrival, which makes the order total, and the message.
_Waiting = tuple[int, int, OutgoingFrame]


class _Gradients:
    """The gradients that wait for one of the streams to a peer, and the streams that wait for gradients. Hold ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Heaps: one of all pushes, since one that waits keeps back those behind it; one of the replies of each step of a group,
        # since others may leave while these give way. Pushes wait for those others.
        self.waiting: dict[GroupStep | None, list[_Waiting]] = {}
        self.arrivals = 0
        self.idle: list[SendQueue] = []
        self.way: RightOfWay | None = None
        self.finished = False

    def wake(self, count: int) -> None:
        """Wake so many of the streams that wait."""
        for _ in range(min(count, len(self.idle))):
            stream = self.idle.pop()
            stream._idle = False
            stream._reasons.put(None)

    def way_is_free(self) -> None:
        with self.lock:
            self.wake(len(self.idle))


def _heap_of(parcel: OutgoingFrame) -> GroupStep | None:
    return parcel.step if parcel.frame.kind is FrameKind.RESULT else None


def _may_leave(gradients: _Gradients, heap: list[_Waiting], way: RightOfWay) -> bool:
    parcel = heap[0][2]
    is_reply = parcel.frame.kind is FrameKind.RESULT
    return way.is_free_for_reply(gradients, parcel.step) if is_reply else way.is_free_for_push(parcel.step)


def _seconds_to_wait(gradients: _Gradients, heaps: list[list[_Waiting]], way: RightOfWay) -> float:
    firsts = [heap[0][2] for heap in heaps]
    pushes = [each.step for each in firsts if each.frame.kind is not FrameKind.RESULT]
    return way.seconds_to_wait(gradients, pushes, [each.step for each in firsts if each.frame.kind is FrameKind.RESULT])


class SendQueue:
    """A blocking iterator of messages that feeds one stream. Only the sending thread iterates it.

    That thread takes a message when the one before has left, so each choice is made at the last moment. Control messages leave
    first, in the order they came. Gradients follow in the ``order`` of their frames, and in the order they came where that is
    equal. With a ``pacer``, gradients enter this queue when they may leave.

    Several streams to one peer share their gradients: each takes the most urgent one when it is free. Control messages are of
    one stream. When the first of these streams ends, the gradients of all are dropped.

    Args:
        beside: a queue of another stream to the same peer, with which this one shares its gradients.
    """

    def __init__(self, pacer: RateLimiter | None = None, beside: SendQueue | None = None) -> None:
        self._gradients: _Gradients = _Gradients() if beside is None else beside._gradients
        # An item for each reason to wake the sender, which waits only if it found nothing to send. This is a semaphore in C. It
        # costs a tenth of a Condition, which would be the largest cost of a small partition.
        self._reasons: SimpleQueue[None] = SimpleQueue()
        self._idle = False  # whether the sender waits, and is among the idle ones
        self._control: deque[OutgoingFrame] = deque()
        self._only_here: list[_Waiting] = []  # a heap of gradients that no other stream takes
        self._pacer = pacer
        self._finished = False
        self._leaving: tuple[GroupStep, int] | None = None  # step and bytes of a reply that others wait for
        self._choose_again_seconds: float | None = None  # even if nothing happens

    def share_with(self, other: SendQueue) -> None:
        """Share the gradients of ``other``, whose stream leads to the same peer, before any were put here."""
        # ``finish`` and ``put_control`` may still hold the lock of before: what they change is of this queue alone.
        with self._gradients.lock:
            if self._idle:
                self._idle = False
                self._gradients.idle.remove(self)
            self._gradients = other._gradients
        self._reasons.put(None)

    def put_control(self, frame: Frame) -> None:
        """Queue a small message before all gradients. Ignored after ``finish``."""
        if self._pacer is not None:
            self._pacer.charge(frame.nbytes)
        with self._gradients.lock:
            if not self._finished:
                self._control.append(OutgoingFrame(frame))
                self._reasons.put(None)

    def put(
        self, frame: Frame, sent: Callable[[], None] | None = None, only_here: bool = False, about: int | None = None
    ) -> None:
        """Queue gradients. Their memory must not change until they have left. Ignored after ``finish``.

        ``only_here``: no other stream takes them. ``about``: the group whose averages a row of norms is about.
        """
        parcel = OutgoingFrame(frame, sent, (frame.group if about is None else about, frame.step))
        if self._pacer is None:
            self._enter(parcel, only_here)
        else:
            # The pacer has one order for all messages of this process; see RightOfWay. Replies of an earlier step come before
            # pushes: a rank that is ahead would otherwise hold back what the others wait for, and ranks would be ahead in turn.
            # Groups count their steps apart, so the models of one process with fewer steps come first.
            is_reply = frame.kind is FrameKind.RESULT
            order = frame.order + _REPLIES_LAST * (2 * frame.step + is_reply)
            self._pacer.submit(order, frame.nbytes, lambda: self._enter(parcel, only_here))

    def yield_to(self, way: RightOfWay) -> None:
        """Send gradients only while ``way`` is free for them, until ``stop_yielding``. Others wait for replies that are put
        from now on."""
        with self._gradients.lock:
            self._gradients.way = way

    def stop_yielding(self) -> None:
        gradients = self._gradients
        with gradients.lock:
            way, gradients.way = gradients.way, None
        if way is not None:
            way.forget(gradients)

    def finish(self) -> None:
        """End the stream once the control messages have left. Waiting gradients are dropped. Idempotent."""
        with self._gradients.lock:
            self._finish()

    def abort(self) -> None:
        """End the stream at once: all waiting messages are dropped. Idempotent."""
        with self._gradients.lock:
            self._control.clear()
            self._finish()

    def __iter__(self) -> SendQueue:
        return self

    def __next__(self) -> OutgoingFrame:
        self._has_left()
        while True:
            gradients = self._gradients
            with gradients.lock:
                parcel = self._choose(gradients)
                if parcel is not None:
                    return parcel
                if self._finished:
                    raise StopIteration
                if gradients is self._gradients:  # otherwise ``share_with`` has put an item into ``_reasons``
                    self._idle = True
                    gradients.idle.append(self)
            with suppress(Empty):
                self._reasons.get(timeout=self._choose_again_seconds)

    def next_now(self) -> OutgoingFrame | None:
        """The next message if one may leave now, otherwise None, also after the end. Only the sending thread calls it."""
        self._has_left()
        gradients = self._gradients
        if not (self._control or self._only_here or gradients.waiting):
            return None
        with gradients.lock:
            return self._choose(gradients)

    # --- called with the lock held ---

    def _choose(self, gradients: _Gradients) -> OutgoingFrame | None:
        """Take the next message, if one may leave now."""
        if self._idle:  # it was woken for itself
            self._idle = False
            gradients.idle.remove(self)
        if self._control:
            return self._control.popleft()
        way, heaps = gradients.way, list(gradients.waiting.values())
        here, pushes = self._only_here, gradients.waiting.get(None)
        if here and (pushes is None or here[0] < pushes[0]):
            heaps = [here, *(heap for heap in heaps if heap is not pushes)]
        free = heaps if way is None else [heap for heap in heaps if _may_leave(gradients, heap, way)]
        self._choose_again_seconds = None
        while not free:
            if not heaps or way is None:
                return None
            if seconds := _seconds_to_wait(gradients, heaps, way):
                self._choose_again_seconds = None if seconds == inf else seconds
                return None
            free = [heap for heap in heaps if _may_leave(gradients, heap, way)]
        heap = min(free)
        _, _, parcel = heappop(heap)
        if not heap and heap is not here:
            del gradients.waiting[_heap_of(parcel)]
        if way is not None and parcel.frame.kind is FrameKind.RESULT:
            self._leaving = parcel.step, parcel.frame.nbytes
        return parcel

    def _finish(self) -> None:
        self._finished = self._gradients.finished = True
        self._gradients.waiting, self._only_here = {}, []  # drops the references to their memory
        self._reasons.put(None)

    # --- called without it ---

    def _has_left(self) -> None:
        """The message that was taken before has left."""
        if self._leaving is not None:
            (step, nbytes), self._leaving, way = self._leaving, None, self._gradients.way
            if way is not None:
                way.reply_left(self._gradients, step, nbytes)

    def _enter(self, parcel: OutgoingFrame, only_here: bool) -> None:
        gradients = self._gradients
        with gradients.lock:
            if gradients.finished:
                return
            gradients.arrivals += 1
            if gradients.way is not None and parcel.frame.kind is FrameKind.RESULT:
                gradients.way.reply_begins(gradients, parcel.step, parcel.frame.nbytes)
            item = (parcel.frame.order, gradients.arrivals, parcel)
            if only_here:
                heappush(self._only_here, item)
                self._reasons.put(None)
            else:
                heappush(gradients.waiting.setdefault(_heap_of(parcel), []), item)
                gradients.wake(1)

    def __repr__(self) -> str:
        with self._gradients.lock:
            waiting = sum(map(len, self._gradients.waiting.values())) + len(self._only_here)
            return f"<SendQueue {len(self._control)} control, {waiting} ready{', finished' if self._finished else ''}>"


@dataclass(slots=True, eq=False)
class _Transfer:
    """A message that waits for the emulated link, or crosses it."""

    priority: int  # the ``order`` given to ``submit``
    nbytes: int
    queued_at: float
    release: Callable[[], None]


class EmulatedLink:
    """The emulated link. Pure: the caller passes the time in seconds, and nothing waits. Not thread-safe.

    The link carries one message at a time. When it becomes free it takes the message of smallest order, and is busy for
    ``nbytes / rate`` seconds. Its clock is absolute: the next message begins when the one before ended, however late the caller
    advances the link, so lateness does not add up.
    """

    def __init__(self, rate_bytes_per_second: float) -> None:
        self._rate = rate_bytes_per_second
        self._waiting: Scheduler[_Transfer] = Scheduler(make_policy("priority"), credit_bytes=0)  # no credit: one at a time
        self._current: _Transfer | None = None
        self._free_at = 0.0

    def submit(self, order: int, nbytes: int, release: Callable[[], None], now: float) -> None:
        """Queue a message. ``advance`` returns its ``release`` when its last byte has left."""
        self._waiting.add(_Transfer(order, nbytes, now, release))

    def charge(self, nbytes: int, now: float) -> None:
        """Account for a message that is too small to wait its turn."""
        self._free_at = max(self._free_at, now) + nbytes / self._rate

    def advance(self, now: float) -> tuple[list[Callable[[], None]], float | None]:
        """Return the ``release`` of each message that has left by ``now``, in order, and the time when the next message will
        have left, or None if the link is idle."""
        released: list[Callable[[], None]] = []
        while True:
            if self._current is None:
                self._current = self._waiting.next()
                if self._current is None:
                    return released, None
                self._free_at = max(self._free_at, self._current.queued_at) + self._current.nbytes / self._rate
            if self._free_at > now:
                return released, self._free_at
            released.append(self._current.release)
            self._waiting.sent(self._current)
            self._current = None


class RateLimiter:
    """An :class:`EmulatedLink` in real time, with one thread. A message is released when its last byte would have left."""

    def __init__(self, rate_bytes_per_second: float) -> None:
        self._link = EmulatedLink(rate_bytes_per_second)
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="commsched-pacer", daemon=True)
        self._thread.start()

    def submit(self, order: int, nbytes: int, release: Callable[[], None]) -> None:
        """Queue a message. The pacer's thread calls ``release`` when the message may leave. Never blocks. Thread-safe."""
        with self._changed:
            self._link.submit(order, nbytes, release, monotonic())
            self._changed.notify()

    def charge(self, nbytes: int) -> None:
        """Account for a message that is sent at once."""
        with self._changed:
            self._link.charge(nbytes, monotonic())

    def close(self) -> None:
        """End the thread, and drop the waiting messages. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while True:
                    if self._closed:
                        return
                    now = monotonic()
                    released, next_at = self._link.advance(now)
                    if released:
                        break
                    self._changed.wait(None if next_at is None else next_at - now)
            for release in released:
                release()
