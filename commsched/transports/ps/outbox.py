"""What waits to be sent on one stream, in the order it should leave."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from ...core.policies import make_policy
from ...core.scheduler import Scheduler
from .frame import Frame, Kind
from .pacer import Pacer
from .right_of_way import RightOfWay

#: Above the order of every push.
_REPLIES_LAST = 2**32


@dataclass(slots=True, eq=False)
class Parcel:
    """A message to send. ``sent``, if given, is to be called once, when its bytes have left and before an answer to it is
    handled."""

    frame: Frame
    sent: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        return self.frame.nbytes

    @property
    def priority(self) -> int:
        return self.frame.order


class Outbox:
    """A blocking iterator of messages that feeds one stream, for the one thread that sends.

    That thread takes a message when the one before has left, so each choice is made at the last moment: control messages as
    they came first, then gradients in the order their frames give, equal ones as they came. With a ``pacer``, gradients
    enter here when they may leave.
    """

    def __init__(self, pacer: Pacer | None = None) -> None:
        self._lock = threading.Lock()
        # One for each message there is to take, and for each reason to look up. A semaphore in C: a tenth of a Condition's
        # cost, which is what a small partition pays most for.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._control: deque[Parcel] = deque()
        self._parcels: Scheduler[Parcel] = Scheduler(make_policy("priority"), credit_bytes=0)  # no credit: one at a time
        self._pacer = pacer
        self._way: RightOfWay | None = None
        self._kept_back = 0  # of those in _wake, how many were taken while the way was not free
        self._finished = False

    def put_control(self, frame: Frame) -> None:
        """Queue a small message before all gradients. Ignored after ``finish``."""
        if self._pacer is not None:
            self._pacer.charge(frame.nbytes)
        with self._lock:
            if not self._finished:
                self._control.append(Parcel(frame))
                self._wake.put(None)

    def put(self, frame: Frame, sent: Callable[[], None] | None = None) -> None:
        """Queue gradients; their memory must stay as it is until they have left. Ignored after ``finish``."""
        parcel = Parcel(frame, sent)
        if self._pacer is None:
            self._enter(parcel)
        else:  # which has one order for all that this process sends; see RightOfWay
            order = frame.order + (_REPLIES_LAST if frame.kind is Kind.RESULT else 0)
            self._pacer.submit(order, frame.nbytes, lambda: self._enter(parcel))

    def give_way(self, way: RightOfWay) -> None:
        """From now on gradients leave only while ``way`` is free. Ends with ``keep_way``."""
        way.add(self._way_is_free)
        with self._lock:
            self._way = way

    def keep_way(self) -> None:
        with self._lock:
            way, self._way = self._way, None
        if way is not None:
            way.remove(self._way_is_free)

    def finish(self) -> None:
        """End the stream once the control messages have left; gradients still waiting are dropped. Idempotent."""
        with self._lock:
            self._finish()

    def abort(self) -> None:
        """End the stream at once: nobody takes messages any more. Idempotent."""
        with self._lock:
            self._control.clear()
            self._finish()

    def __iter__(self) -> Outbox:
        return self

    def __next__(self) -> Parcel:
        while True:
            self._wake.get()
            with self._lock:
                if self._control:
                    return self._control.popleft()
                if self._finished:
                    self._wake.put(None)  # for who asks again
                    raise StopIteration
                if self._way is not None and not self._way.is_free:
                    self._kept_back += 1
                    continue
                parcel = self._parcels.next()
                if parcel is not None:
                    self._parcels.sent(parcel)  # it will have when the caller comes back
                    return parcel

    def _enter(self, parcel: Parcel) -> None:
        with self._lock:
            if not self._finished:
                self._parcels.add(parcel)
                self._wake.put(None)

    def _way_is_free(self) -> None:
        with self._lock:
            while self._kept_back:
                self._kept_back -= 1
                self._wake.put(None)

    def _finish(self) -> None:
        self._finished = True
        self._parcels = Scheduler(make_policy("priority"), credit_bytes=0)  # their memory is free
        self._wake.put(None)

    def __repr__(self) -> str:
        with self._lock:
            return f"<Outbox {len(self._control)} control, {self._parcels!r}{', finished' if self._finished else ''}>"
