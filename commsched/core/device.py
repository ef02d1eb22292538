"""The interface of a device: memory that holds gradients, and queues of work on it. ``commsched.devices`` has the devices."""

from __future__ import annotations

from typing import Any, Protocol

from .device_events import Event
from .interfaces import Buffer


class DeviceEvent(Event, Protocol):
    """A point in a stream: it has happened when the device has done all work that was queued there before it.

    Any thread may use it. What the device did before the event is visible to whoever has seen that the event has happened.
    """

    def is_done(self) -> bool:
        """Whether it has happened. Never waits. Raises the device's error if the device failed."""


class DeviceStream(Protocol):
    """A queue of work on a device. Work of one stream is done in order; streams run side by side.

    Every method but :meth:`synchronize` only queues work, and returns before it is done, perhaps long before. The memory that
    the work uses must exist until it is done. What it reads must not be written, and what it writes must not be read or
    written, except by work that is ordered behind it: later work of this stream, work of a stream that waits for an event
    recorded here, and the host once it has seen such an event. Any thread may call them, one at a time for each stream.

    All raise the device's error if the device has failed.
    """

    def record(self) -> DeviceEvent:
        """Return an event behind all work queued so far."""

    def wait(self, event: DeviceEvent) -> None:
        """Let work that is queued later wait for ``event``, which may be of another stream of the device. The host does not
        wait."""

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy the bytes of ``source`` to ``target``. One of them is memory of the device, the other as well or memory of
        ``Device.allocate_host`` or ``Device.pin``. They must not overlap.

        Raises:
            ValueError: their sizes differ, or one of them is memory that this device does not copy.
        """

    def add(self, into: Buffer, values: Buffer, dtype: str) -> None:
        """Add the elements of ``values`` to those of ``into``. Both are memory of the device, on element borders. The sum of
        two 16-bit floats is that of float32, rounded to nearest even; sums of ``uint8`` wrap at 256.

        Raises:
            ValueError: as :meth:`copy`.
        """

    def divide(self, values: Buffer, by: int, dtype: str) -> None:
        """Divide each of ``values``, of type float32 or float64, by ``by``, and round the quotient to nearest even.

        Raises:
            ValueError: as :meth:`copy`, or it is another type.
        """

    def cast(self, target: Buffer, to: str, source: Buffer, dtype: str) -> None:
        """Write the elements of ``source``, of type ``dtype``, to ``target`` as type ``to``. One type is float32 and the other
        one float16 or bfloat16. Rounds to nearest even; NaN stays NaN, and what a type cannot hold becomes infinite.

        Raises:
            ValueError: as :meth:`copy`, or there is no such cast.
        """

    def synchronize(self) -> None:
        """Return when all work queued so far is done. Waits without the interpreter's lock."""


class Device(Protocol):
    """Memory and streams of one device. Any thread may use it.

    Attributes:
        name: the kind of device and its number as its library counts, such as ``cuda:0``; ``host`` is the host's own memory.
    """

    name: str

    def allocate(self, nbytes: int) -> Buffer:
        """Return so many bytes of the device's memory, all zero. Slices are views, ``len`` is the number of bytes. Any stream
        may use it at once."""

    def allocate_host(self, nbytes: int) -> memoryview:
        """Return so many bytes of the host's memory, all zero, which streams of this device can copy from and to while the
        host does something else (pinned memory). A flat writable view of format ``B``."""

    def pin(self, memory: memoryview) -> memoryview:
        """Pin memory of the host that exists, such as memory that processes share, until the last view of it is gone that this
        returns. Return a view of the same bytes, which streams can copy from and to as memory of :meth:`allocate_host`.
        ``memory`` is whole pages, flat, writable and of format ``B``.

        Raises:
            UnsupportedError: the memory cannot be pinned, perhaps because it is pinned already; says why.
        """

    def view(self, array: Any) -> Buffer:
        """Return the memory of an engine's array as flat bytes, without a copy. The array must lie on this device, in one
        piece. Nothing waits for work that still writes the array.

        Raises:
            UnsupportedError: it is not such an array; names its type and the reason.
        """

    def stream(self, priority: int = 0) -> DeviceStream:
        """Return a new stream, which waits for no other one. If several have work that can run, smaller numbers come first."""

    def current_stream(self, of: Any = None) -> DeviceStream:
        """Return a stream that exists: the engine's stream ``of``, or else the one on which the device's own library queues the
        work of this thread."""
