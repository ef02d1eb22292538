"""The messages that wait to be sent on one stream, in the order in which they should leave, and what they wait for: pushes of
this rank, and an optional cap on the sending rate of the process, which is an emulated link that all its streams share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from queue import SimpleQueue
from time import monotonic

from ....core.policies import make_policy
from ....core.scheduler import Scheduler
from .frame import Frame, FrameKind

#: Added to the order of replies of a step for the pacer. It is larger than the order of every push.
_REPLIES_LAST = 2**32


class PushPriority:
    """Taken while a push of this rank is leaving. A stream that gives way asks ``is_free_for`` before each reply.

    All ranks wait for a push, but only one rank waits for a reply. If both share the link equally, replies of layers that are
    needed last delay the pushes of front layers. In simulation and on shaped links that costs 4 to 8 % of a step. There is no
    deadlock, because a push never waits for a reply to leave. Thread-safe.

    A reply of an earlier step than this rank's pushes does not give way. Its receiver is behind, in that earlier step, and no
    push of this rank can be averaged before the receiver has caught up. If such replies gave way, a rank that is a little ahead
    would hold back the others, and ranks that are once apart would stay apart: in simulation a step then took up to 1.3 times
    as long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0
        self._latest: dict[int, int] = {}  # by group: the latest step of which this rank has begun a push
        self._waiting: list[Callable[[], None]] = []

    def is_free_for(self, reply: Frame) -> bool:
        return self._taken == 0 or reply.step < self._latest.get(reply.group, 0)

    def take(self, group: int, step: int) -> None:
        waiting: list[Callable[[], None]] = []
        with self._lock:
            self._taken += 1
            if step > self._latest.get(group, -1):
                self._latest[group] = step
                waiting, self._waiting = self._waiting, waiting  # replies of the step before need not give way any more
        for when_free in waiting:
            when_free()

    def give_back(self) -> None:
        waiting: list[Callable[[], None]] = []
        with self._lock:
            self._taken -= 1
            if self._taken == 0:
                waiting, self._waiting = self._waiting, waiting
        for when_free in waiting:
            when_free()

    def must_wait(self, reply: Frame, when_free: Callable[[], None]) -> bool:
        """Whether ``reply`` may not leave now. Then ``when_free`` is called once, when it may or another one may. It asks
        again."""
        if self.is_free_for(reply):
            return False
        with self._lock:
            if self.is_free_for(reply):
                return False
            if when_free not in self._waiting:
                self._waiting.append(when_free)
            return True

    def forget(self, when_free: Callable[[], None]) -> None:
        """Do not call ``when_free`` any more."""
        with self._lock:
            if when_free in self._waiting:
                self._waiting.remove(when_free)

    def __repr__(self) -> str:
        return f"<PushPriority {self._taken} pushes leaving, {len(self._waiting)} streams give way>"


@dataclass(slots=True, eq=False)
class OutgoingFrame:
    """A message to send. If ``sent`` is given, the sender calls it once, when the bytes have left and before an answer to the
    message is handled."""

    frame: Frame
    sent: Callable[[], None] | None = None


class SendQueue:
    """A blocking iterator of messages that feeds one stream. Only the sending thread iterates it.

    That thread takes a message when the one before has left, so each choice is made at the last moment. Control messages leave
    first, in the order they came. Gradients follow in the ``order`` of their frames, and in the order they came where that is
    equal. With a ``pacer``, gradients enter this queue when they may leave.
    """

    def __init__(self, pacer: RateLimiter | None = None) -> None:
        self._lock = threading.Lock()
        # One item for each message to take, and for each other reason to wake the sender. This is a semaphore in C. It costs a
        # tenth of a Condition, which would be the largest cost of a small partition.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._control: deque[OutgoingFrame] = deque()
        self._gradients: list[tuple[int, int, OutgoingFrame]] = []  # a heap of (order, number of arrival, message)
        self._arrivals = 0
        self._pacer = pacer
        self._way: PushPriority | None = None
        self._kept_back = 0  # number of items taken from _wake while pushes had priority
        self._finished = False

    def put_control(self, frame: Frame) -> None:
        """Queue a small message before all gradients. Ignored after ``finish``."""
        if self._pacer is not None:
            self._pacer.charge(frame.nbytes)
        with self._lock:
            if not self._finished:
                self._control.append(OutgoingFrame(frame))
                self._wake.put(None)

    def put(self, frame: Frame, sent: Callable[[], None] | None = None) -> None:
        """Queue gradients. Their memory must not change until they have left. Ignored after ``finish``."""
        parcel = OutgoingFrame(frame, sent)
        if self._pacer is None:
            self._enter(parcel)
        else:
            # The pacer has one order for all messages of this process; see PushPriority. Replies of an earlier step come before
            # pushes: a rank that is ahead would otherwise hold back what the others wait for, and ranks would be ahead in turn.
            # Groups count their steps apart, so the models of one process with fewer steps come first.
            is_reply = frame.kind is FrameKind.RESULT
            order = frame.order + _REPLIES_LAST * (2 * frame.step + is_reply)
            self._pacer.submit(order, frame.nbytes, lambda: self._enter(parcel))

    def yield_to(self, way: PushPriority) -> None:
        """Send gradients only while ``way`` is free for them, until ``stop_yielding``."""
        with self._lock:
            self._way = way

    def stop_yielding(self) -> None:
        with self._lock:
            way, self._way = self._way, None
        if way is not None:
            way.forget(self._way_is_free)

    def finish(self) -> None:
        """End the stream once the control messages have left. Waiting gradients are dropped. Idempotent."""
        with self._lock:
            self._finish()

    def abort(self) -> None:
        """End the stream at once: all waiting messages are dropped. Idempotent."""
        with self._lock:
            self._control.clear()
            self._finish()

    def __iter__(self) -> SendQueue:
        return self

    def __next__(self) -> OutgoingFrame:
        while True:
            parcel = self._woken()
            if parcel is not None:
                return parcel
            with self._lock:
                # A control message and the end may have come since the item that was kept back.
                if self._finished and not self._control:
                    raise StopIteration

    def next_now(self) -> OutgoingFrame | None:
        """The next message if one may leave now, otherwise None, also after the end. Only the sending thread calls it."""
        return None if self._wake.empty() else self._woken()

    def _woken(self) -> OutgoingFrame | None:
        """Wait for an item of ``_wake``. Return what to send for it, if anything."""
        self._wake.get()
        with self._lock:
            if self._control:
                return self._control.popleft()
            if self._finished:
                self._wake.put(None)  # for the next call
            elif self._gradients:
                if self._way is None or not self._way.must_wait(self._gradients[0][2].frame, self._way_is_free):
                    return heappop(self._gradients)[2]
                self._kept_back += 1
            return None

    def _enter(self, parcel: OutgoingFrame) -> None:
        with self._lock:
            if not self._finished:
                self._arrivals += 1
                heappush(self._gradients, (parcel.frame.order, self._arrivals, parcel))
                self._wake.put(None)

    def _way_is_free(self) -> None:
        with self._lock:
            while self._kept_back:
                self._kept_back -= 1
                self._wake.put(None)

    def _finish(self) -> None:
        self._finished = True
        self._gradients = []  # drops the references to their memory
        self._wake.put(None)

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"<Outbox {len(self._control)} control, {len(self._gradients)} ready{', finished' if self._finished else ''}>"
            )


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
