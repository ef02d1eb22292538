"""What waits to be sent on one stream, in the order it should leave."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...core.policies import make_policy
from ...core.scheduler import Scheduler
from .frame import Frame, encode
from .pacer import Pacer


@dataclass(slots=True, eq=False)
class _Parcel:
    """Gradients to send. ``message`` makes the bytes when it is their turn, so that nothing is copied early."""

    priority: int  # the order it was given
    nbytes: int
    message: Callable[[], bytes]


class Outbox:
    """A blocking iterator of messages that feeds one gRPC stream.

    gRPC takes one message at a time and comes back when it has room for another, so each choice is made at the last moment:
    control messages as they came first, then gradients in the order given. With a ``pacer``, gradients enter here when they
    may leave.
    """

    def __init__(self, pacer: Pacer | None = None) -> None:
        self._changed = threading.Condition()
        self._control: deque[bytes] = deque()
        self._parcels: Scheduler[_Parcel] = Scheduler(make_policy("priority"), credit_bytes=0)  # no credit: one at a time
        self._leaving: _Parcel | None = None  # given to gRPC, which has not asked for another yet
        self._pacer = pacer
        self._finished = False

    def put_control(self, frame: Frame) -> None:
        """Queue a small message before all gradients. Ignored after ``finish``."""
        message = encode(frame)
        if self._pacer is not None:
            self._pacer.charge(len(message))
        with self._changed:
            if not self._finished:
                self._control.append(message)
                self._changed.notify()

    def put(self, order: int, nbytes: int, message: Callable[[], bytes]) -> None:
        """Queue gradients of ``nbytes``, those of smallest ``order`` first, equal ones as they came.

        ``message`` is called when they leave, by gRPC's thread.
        """
        parcel = _Parcel(order, nbytes, message)
        if self._pacer is None:
            self._enter(parcel)
        else:
            self._pacer.submit(order, nbytes, lambda: self._enter(parcel))

    def finish(self) -> None:
        """End the stream once the control messages have left; gradients still waiting are dropped. Idempotent."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def abort(self) -> None:
        """End the stream at once: nobody takes messages any more. Idempotent."""
        with self._changed:
            self._finished = True
            self._control.clear()
            self._changed.notify_all()

    def __iter__(self) -> Outbox:
        return self

    def __next__(self) -> bytes:
        with self._changed:
            if self._leaving is not None:
                self._parcels.sent(self._leaving)
                self._leaving = None
            while True:
                if self._control:
                    return self._control.popleft()
                if self._finished:
                    raise StopIteration
                parcel = self._parcels.next()
                if parcel is not None:
                    self._leaving = parcel
                    break
                self._changed.wait()
        return parcel.message()

    def _enter(self, parcel: _Parcel) -> None:
        with self._changed:
            if not self._finished:
                self._parcels.add(parcel)
                self._changed.notify()

    def __repr__(self) -> str:
        with self._changed:
            return f"<Outbox {len(self._control)} control, {self._parcels!r}{', finished' if self._finished else ''}>"
