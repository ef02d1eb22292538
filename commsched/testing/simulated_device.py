"""SimulatedDevice: a device in the host's memory whose work is done as late, and as much out of step, as a device may do it."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from ..core.device import Device, DeviceEvent, DeviceStream
from ..core.errors import UnsupportedError
from ..core.interfaces import Buffer
from ..core.manifest import ITEMSIZE
from ..devices.arithmetic import (
    add_elements,
    cast_elements,
    divide_elements,
    require_cast,
    require_equal_sizes,
    require_quotients,
)

_Bytes = NDArray[np.uint8]

#: Every byte of memory that is being written has this value: then floats of all types are NaN.
POISON = 0xFF


class SimulatedFailure(RuntimeError):
    """The error of a device that a test lets fail."""


class SimulatedBuffer:
    """Memory of a simulated device. The host can slice it, and read it by copies only."""

    __slots__ = ("_memory", "device")

    def __init__(self, device: SimulatedDevice, memory: _Bytes) -> None:
        self.device = device
        self._memory = memory

    def __getitem__(self, span: slice, /) -> SimulatedBuffer:
        if not isinstance(span, slice) or span.step not in (None, 1):
            raise TypeError(f"the host cannot read memory of {self.device.name}, but slice it")
        return SimulatedBuffer(self.device, self._memory[span])

    def __len__(self) -> int:
        return self._memory.size

    def __array__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise TypeError(f"the host cannot read memory of {self.device.name}; copy it")

    def __repr__(self) -> str:
        return f"<SimulatedBuffer of {len(self)} bytes on {self.device.name}>"


class SimulatedCollective:
    """Work of several streams that is done together, when each of them has come to its part: a collective."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[tuple[SimulatedStream, _Work]] = []

    @property
    def is_complete(self) -> bool:
        return len(self.parts) == self.size


@dataclass(slots=True, eq=False)
class _Work:
    """A piece of work in a stream, perhaps a part of a ``collective``. ``after``: it is nothing but the wait for that event."""

    run: Callable[[], None]
    reads: Sequence[_Bytes] = ()
    writes: Sequence[_Bytes] = ()
    keeps: bool = False  # it needs what its memory held before
    due: float = 0.0
    after: SimulatedEvent | None = None
    collective: SimulatedCollective | None = None
    is_poisoned: bool = False
    kept: Sequence[_Bytes] = ()

    def poison(self) -> None:
        self.is_poisoned = True
        if self.keeps:
            self.kept = [memory.copy() for memory in self.writes]
        for memory in self.writes:
            memory.fill(POISON)

    def touches(self, memory: _Bytes) -> bool:
        return any(np.may_share_memory(mine, memory) for mine in (*self.reads, *self.writes))

    def finish(self) -> None:
        for memory, before in zip(self.writes, self.kept):
            memory[:] = before
        self.run()


class SimulatedEvent(DeviceEvent):
    """See ``DeviceEvent``. Happens when somebody waits for it, or asks often enough."""

    def __init__(self, stream: SimulatedStream, place: int, due: float) -> None:
        self.stream = stream
        self.due = due
        self._place = place

    @property
    def has_happened(self) -> bool:
        return self.stream.finished >= self._place

    def synchronize(self) -> None:
        self.stream.device.wait_until(self)

    def is_done(self) -> bool:
        return self.stream.device.ask(self)


class SimulatedStream(DeviceStream):
    """See ``DeviceStream``. :meth:`launch` queues any other work, as an engine would."""

    def __init__(self, device: SimulatedDevice, priority: int = 0) -> None:
        self.device = device
        self.priority = priority
        self.queue: deque[_Work] = deque()
        self.finished = 0  # pieces of work
        self.due = 0.0  # when the last piece of work may be done

    def record(self) -> SimulatedEvent:
        with self.device.entered():
            return SimulatedEvent(self, self.finished + len(self.queue), self.due)

    def wait(self, event: DeviceEvent) -> None:
        if not isinstance(event, SimulatedEvent) or event.stream.device is not self.device:
            raise ValueError(f"{event!r} is not an event of {self.device.name}")
        with self.device.entered():
            self.due = max(self.due, event.due)
            self.device.queue(self, _Work(lambda: None, after=event))

    def copy(self, target: Buffer, source: Buffer) -> None:
        require_equal_sizes(target, source)
        to, there = self.device.memory_of(target)
        from_, here = self.device.memory_of(source)
        if not (there or here):
            raise ValueError(f"neither side of the copy is memory of {self.device.name}")

        def run() -> None:
            to[:] = from_

        with self.device.entered():
            self.due = self.device.copy_ends(self.due, to.size, outwards=not there, within=there and here)
            self.device.queue(self, _Work(run, (from_,), (to,), due=self.due))

    def add(self, into: Buffer, values: Buffer, dtype: str) -> None:
        require_equal_sizes(into, values, ITEMSIZE[dtype])
        self.launch(lambda others, total: add_elements(total, others, dtype), [values], [into])

    def divide(self, values: Buffer, by: int, dtype: str) -> None:
        require_quotients(values, dtype)
        self.launch(lambda memory: divide_elements(memory, by, dtype), writes=[values])

    def cast(self, target: Buffer, to: str, source: Buffer, dtype: str) -> None:
        require_cast(target, to, source, dtype)
        self.launch(lambda here, there: cast_elements(there, to, here, dtype), [source], [target])

    def launch(
        self,
        kernel: Callable[..., None],
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        seconds: float = 0.0,
        collective: SimulatedCollective | None = None,
    ) -> None:
        """Queue ``kernel(*reads, *writes)``, which gets the memory of the device as arrays of uint8 and takes ``seconds``. The
        kernels of a ``collective`` are called one right after the other, when all parts of it are queued and each is the next
        in its stream. So whoever waits for one waits until the others are queued."""
        pairs = [self.device.memory_of(buffer) for buffer in (*reads, *writes)]
        if not all(there for _, there in pairs):
            raise ValueError(f"a kernel of {self.device.name} uses its memory only")
        arrays = [array for array, _ in pairs]
        with self.device.entered():
            self.due = max(self.due, self.device.now()) + seconds if seconds else self.due
            work = _Work(lambda: kernel(*arrays), arrays, arrays[len(reads) :], keeps=True, due=self.due, collective=collective)
            if collective is not None:
                collective.parts.append((self, work))
            self.device.queue(self, work)

    def synchronize(self) -> None:
        self.record().synchronize()


class SimulatedDevice(Device):
    """See ``Device``. It does no work before somebody waits for it, and then only what that needs and, by chance, some more.

    So what is not ordered by events or by a stream happens in an order that hardly any real device would show. Memory that
    work will write holds NaN from the call that queues the work, or, if earlier work still uses that memory, from the time at
    which the work could start, until the work is done. Work reads memory when it ends. So an early read gives NaN, and a
    source that is overwritten too early gives what it was overwritten with.

    Args:
        seed: decides what is done early.
        number: the number in its :attr:`name`.
        copy_rate: bytes per second of copies from the host to the device, and of copies to the host, which share nothing. They
            take time of the clock, in which the host may do something else. None: copies take no time.
    """

    def __init__(self, seed: int = 0, *, number: int = 0, copy_rate: float | None = None) -> None:
        self.name = f"simulated:{number}"
        self.copy_rate = copy_rate
        self._chance = random.Random(seed)
        self._changed = threading.Condition(threading.RLock())  # guards all streams and all below
        self._streams: list[SimulatedStream] = []
        self._pinned: list[tuple[int, int, ref[_Bytes]]] = []
        self._engine_ends = {True: 0.0, False: 0.0}  # when copies outwards and inwards are done
        self._current = threading.local()
        self._held = False
        self._failure: Exception | None = None
        self._fails_after: tuple[int, Exception] | None = None
        self._default = self.stream()

    def allocate(self, nbytes: int) -> SimulatedBuffer:
        return SimulatedBuffer(self, np.zeros(nbytes, np.uint8))

    def allocate_host(self, nbytes: int) -> memoryview:
        memory = np.zeros(nbytes, np.uint8)
        with self.entered():
            self._note_pinned(memory)
        return memory.data

    def pin(self, memory: memoryview) -> memoryview:
        if memory.readonly:
            raise UnsupportedError(f"{len(memory)} bytes of the host's memory are read-only, and not pinned for {self.name}")
        pinned = np.frombuffer(memory, np.uint8)
        start, stop = _address(pinned), _address(pinned) + pinned.size
        with self.entered():
            if any(first < stop and start < last for first, last in self._all_pinned()):
                raise UnsupportedError(f"{pinned.size} bytes of the host's memory are already pinned for {self.name}")
            self._note_pinned(pinned)
        return pinned.data

    def _note_pinned(self, memory: _Bytes) -> None:
        start = _address(memory)
        self._pinned = [pinned for pinned in self._pinned if pinned[2]() is not None]
        self._pinned.append((start, start + memory.size, ref(memory)))

    def _all_pinned(self) -> list[tuple[int, int]]:
        """First address of all memory that is pinned now, and the one behind its last."""
        return [(first, stop) for first, stop, memory in self._pinned if memory() is not None]

    def view(self, array: Any) -> SimulatedBuffer:
        """``array`` is a :class:`SimulatedBuffer` or has one as its ``__simulated_memory__``."""
        buffer = getattr(array, "__simulated_memory__", array)
        if not isinstance(buffer, SimulatedBuffer) or buffer.device is not self:
            raise UnsupportedError(f"a {type(array).__name__} is not in the memory of {self.name}")
        return buffer

    def stream(self, priority: int = 0) -> SimulatedStream:
        stream = SimulatedStream(self, priority)
        with self._changed:
            self._streams.append(stream)
        return stream

    def current_stream(self, of: Any = None) -> SimulatedStream:
        if isinstance(of, SimulatedStream):
            return of
        stream: SimulatedStream = getattr(self._current, "stream", self._default)
        return stream

    # What tests use.

    @contextmanager
    def using(self, stream: SimulatedStream) -> Iterator[None]:
        """Make ``stream`` the current one of this thread within the block."""
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    @property
    def outstanding(self) -> int:
        """The number of pieces of work that are queued and not done."""
        with self._changed:
            return sum(work.after is None for stream in self._streams for work in stream.queue)

    def peek(self, buffer: SimulatedBuffer) -> bytes:
        """What the memory holds now. Waits for nothing and does no work."""
        with self._changed:
            return buffer._memory.tobytes()

    def fail(self, error: Exception | None = None, after: int = 0) -> None:
        """Fail with ``error`` after so many more pieces of work. All calls and waits raise it from then on, and what is still
        queued is never done."""
        error = SimulatedFailure(f"{self.name} failed") if error is None else error
        with self._changed:
            if after == 0:
                self._failure = error
            else:
                self._fails_after = (after, error)
            self._changed.notify_all()

    def break_off(self, collective: SimulatedCollective, stream: SimulatedStream) -> None:
        """Let the parts of ``collective`` in ``stream`` end for themselves, without a result. The others wait for them for
        ever."""
        with self._changed:
            for _, work in [part for part in collective.parts if part[0] is stream]:
                collective.parts.remove((stream, work))
                work.collective, work.run, work.kept = None, lambda: None, ()
            self._changed.notify_all()

    def hold(self) -> None:
        """Do nothing more until :meth:`resume`; who waits for work waits until then."""
        with self._changed:
            self._held = True

    def resume(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    # What its streams and events use.

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Hold the lock. Raises the failure."""
        with self._changed:
            self._require_working()
            yield

    def now(self) -> float:
        return time.monotonic()

    def memory_of(self, buffer: Buffer) -> tuple[_Bytes, bool]:
        """The memory of ``buffer``, and whether it is the device's. Raises ValueError if it is neither that nor pinned."""
        if isinstance(buffer, SimulatedBuffer):
            if buffer.device is not self:
                raise ValueError(f"{buffer} is not memory of {self.name}")
            return buffer._memory, True
        if not isinstance(buffer, memoryview):
            raise ValueError(f"a {type(buffer).__name__} is no memory that {self.name} copies")
        memory: _Bytes = np.asarray(buffer)
        start = _address(memory)
        if not any(first <= start and start + memory.size <= stop for first, stop in self._all_pinned()):
            raise ValueError(f"{memory.size} bytes of the host's memory are not pinned for {self.name}")
        return memory, False

    def copy_ends(self, begin: float, nbytes: int, *, outwards: bool, within: bool) -> float:
        """When a copy of so many bytes, which is queued now behind what is done at ``begin``, is done."""
        if self.copy_rate is None or within:
            return begin
        end = max(begin, self.now(), self._engine_ends[outwards]) + nbytes / self.copy_rate
        self._engine_ends[outwards] = end
        return end

    def queue(self, stream: SimulatedStream, work: _Work) -> None:
        queued = [other for each in self._streams for other in each.queue]
        if not any(other.touches(memory) for other in queued for memory in work.writes):
            work.poison()
        stream.queue.append(work)
        self._start()
        if work.collective is not None:
            self._changed.notify_all()

    def wait_until(self, event: SimulatedEvent) -> None:
        """Do work until ``event`` has happened, and perhaps other work before."""
        with self._changed:
            while True:
                self._require_working()
                remaining = event.due - self.now() if event.due else 0.0
                if not self._held and remaining <= 0:
                    break
                self._changed.wait(None if self._held else remaining)
            self._do_other_work()
            self._do_until(event)

    def ask(self, event: SimulatedEvent) -> bool:
        """Whether ``event`` has happened. Sometimes does the work that it needs."""
        with self.entered():
            if not self._held and event.due <= self.now() and self._chance.random() < 0.5:
                self._do_until(event, waits=False)
            return event.has_happened

    def _require_working(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _start(self) -> None:
        """Drop waits for events that have happened, and poison the memory of work that nothing is before."""
        moved = True
        while moved:
            moved = False
            for stream in self._streams:
                while stream.queue and (event := stream.queue[0].after) is not None and event.has_happened:
                    self._finish(stream)
                    moved = True
                if stream.queue and not stream.queue[0].is_poisoned:
                    stream.queue[0].poison()

    def _finish(self, stream: SimulatedStream) -> None:
        """Finish the first work of ``stream``."""
        if stream.queue[0].after is None and self._fails_after is not None:
            left, error = self._fails_after
            if left == 0:
                self._failure = error
                self._changed.notify_all()
                raise error
            self._fails_after = (left - 1, error)
        stream.queue[0].finish()
        stream.queue.popleft()
        stream.finished += 1

    def _do_until(self, event: SimulatedEvent, waits: bool = True) -> bool:
        """Do work until ``event`` has happened. If a part of a collective is not queued yet, wait for it, or return False."""
        while not event.has_happened:
            head = event.stream.queue[0]
            if head.after is not None:
                if not self._do_until(head.after, waits):
                    return False
            elif (collective := head.collective) is None:
                self._finish(event.stream)
            elif not collective.is_complete or self._held:
                if not waits:
                    return False
                self._changed.wait()
                self._require_working()
            elif (late := next((part for part in collective.parts if part[0].queue[0] is not part[1]), None)) is not None:
                stream, work = late
                if not self._do_until(SimulatedEvent(stream, stream.finished + stream.queue.index(work), 0.0), waits):
                    return False
            else:
                for stream, _ in collective.parts:
                    self._finish(stream)
            self._start()
        return True

    def _do_other_work(self) -> None:
        """Half of the time, finish some work that nobody waits for."""
        for _ in range(self._chance.choice((0, 0, 1, 5))):
            ready = [
                stream
                for stream in self._streams
                if stream.queue
                and (head := stream.queue[0]).after is None
                and head.collective is None
                and head.due <= self.now()
            ]
            if not ready:
                return
            self._finish(self._chance.choice(ready))
            self._start()


def _address(memory: _Bytes) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address
