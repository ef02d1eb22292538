"""What waits to be sent on one stream, in the order it should leave."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from ...core.policies import make_policy
from ...core.scheduler import Scheduler
from .frame import Frame
from .pacer import Pacer


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
        else:
            self._pacer.submit(frame.order, frame.nbytes, lambda: self._enter(parcel))

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
                parcel = self._parcels.next()
                if parcel is not None:
                    self._parcels.sent(parcel)  # it will have when the caller comes back
                    return parcel

    def _enter(self, parcel: Parcel) -> None:
        with self._lock:
            if not self._finished:
                self._parcels.add(parcel)
                self._wake.put(None)

    def _finish(self) -> None:
        self._finished = True
        self._parcels = Scheduler(make_policy("priority"), credit_bytes=0)  # their memory is free
        self._wake.put(None)

    def __repr__(self) -> str:
        with self._lock:
            return f"<Outbox {len(self._control)} control, {self._parcels!r}{', finished' if self._finished else ''}>"
