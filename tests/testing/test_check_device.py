"""check_device must refuse devices that are wrong in one way each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from commsched.devices.backends.host import HostDevice
from commsched.testing import SimulatedBuffer, SimulatedDevice, SimulatedEvent, SimulatedStream, check_device
from commsched.testing.check_device import CheckedDevice, check_failure


def check(device: SimulatedDevice) -> None:
    """The check, as short as it shows every device below."""
    check_device(device, make_array=device.allocate, break_device=device.fail, rounds=8, busy_bytes=64, timeout_seconds=60)


def done_at_once(stream: SimulatedStream) -> None:
    """Do the work that was queued last, before all that is before it."""
    work = stream.queue.pop()
    work.finish()
    stream.finished += 1


class Stream(SimulatedStream):
    """A right one; the wrong ones change a method."""


class Device(SimulatedDevice):
    streams: type[SimulatedStream] = Stream

    def stream(self, priority: int = 0) -> SimulatedStream:
        stream = self.streams(self, priority)
        with self._changed:
            self._streams.append(stream)
        return stream


class IgnoresEvents(Stream):
    def wait(self, event: Any) -> None:
        pass


class RecordsTooEarly(Stream):
    """The last copy is not ordered behind its event."""

    def record(self) -> SimulatedEvent:
        event = super().record()
        return SimulatedEvent(self, event._place - 1, event.due)


class RecordsNothing(Stream):
    def record(self) -> SimulatedEvent:
        return SimulatedEvent(self, 0, 0.0)


class CopiesAtOnce(Stream):
    def copy(self, target: Any, source: Any) -> None:
        super().copy(target, source)
        done_at_once(self)


class CopiesFromTheHostAtOnce(Stream):
    def copy(self, target: Any, source: Any) -> None:
        super().copy(target, source)
        if isinstance(source, memoryview) and len(self.queue) > 0:
            done_at_once(self)


class CopiesToTheHostAtOnce(Stream):
    def copy(self, target: Any, source: Any) -> None:
        super().copy(target, source)
        if isinstance(target, memoryview) and len(self.queue) > 0:
            done_at_once(self)


class AddsAtOnce(Stream):
    def add(self, into: Any, values: Any, dtype: str) -> None:
        super().add(into, values, dtype)
        done_at_once(self)


class LastInFirstOut(Stream):
    def copy(self, target: Any, source: Any) -> None:
        super().copy(target, source)
        if len(self.queue) > 2 and all(work.after is None for work in self.queue):
            self.queue[-1], self.queue[-2] = self.queue[-2], self.queue[-1]


class SynchronizesLess(Stream):
    def synchronize(self) -> None:
        pass


class ForgetsTheLastByte(Stream):
    def copy(self, target: Any, source: Any) -> None:
        super().copy(target[: len(target) - 1], source[: len(source) - 1])


class AcceptsOtherSizes(Stream):
    def copy(self, target: Any, source: Any) -> None:
        size = min(len(target), len(source))
        super().copy(target[:size], source[:size])


class AddsInSixteenBits(Stream):
    def add(self, into: Any, values: Any, dtype: str) -> None:
        if dtype != "bfloat16":
            super().add(into, values, dtype)
            return

        def truncated(other: Any, total: Any) -> None:
            def wide(each: Any) -> Any:
                return (each.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

            with np.errstate(all="ignore"):
                total.view(np.uint16)[:] = (wide(total) + wide(other)).view(np.uint32) >> 16

        self.launch(truncated, [values], [into])


class RoundsHalvesAway(Stream):
    def cast(self, target: Any, to: str, source: Any, dtype: str) -> None:
        if (to, dtype) != ("bfloat16", "float32"):
            super().cast(target, to, source, dtype)
            return

        def away(here: Any, there: Any) -> None:
            bits = here.view(np.uint32).astype(np.uint64)
            nan = np.isnan(here.view(np.float32))
            there.view(np.uint16)[:] = np.where(nan, 0x7FC0, (bits + 0x8000) >> 16).astype(np.uint16)

        self.launch(away, [source], [target])


class MultipliesByTheReciprocal(Stream):
    def divide(self, values: Any, by: int, dtype: str) -> None:
        def multiply(memory: Any) -> None:
            numbers = memory.view(dtype)
            with np.errstate(all="ignore"):
                np.multiply(numbers, numbers.dtype.type(1) / numbers.dtype.type(by), out=numbers)

        self.launch(multiply, writes=[values])


class DividesAnything(Stream):
    def divide(self, values: Any, by: int, dtype: str) -> None:
        if dtype != "float16":
            super().divide(values, by, dtype)


class LosesNaN(Stream):
    def cast(self, target: Any, to: str, source: Any, dtype: str) -> None:
        super().cast(target, to, source, dtype)
        if to == "bfloat16":
            self.launch(lambda out: np.putmask(out.view(np.uint16), out.view(np.uint16) > 0xFF80, 0xFF80), writes=[target])


class CastsAnything(Stream):
    def cast(self, target: Any, to: str, source: Any, dtype: str) -> None:
        if {to, dtype} == {"float16", "bfloat16"}:
            return
        super().cast(target, to, source, dtype)


class DirtyMemory(Device):
    def allocate(self, nbytes: int) -> SimulatedBuffer:
        return SimulatedBuffer(self, np.full(nbytes, 7, np.uint8))


class DirtyHostMemory(Device):
    def allocate_host(self, nbytes: int) -> memoryview:
        memory = super().allocate_host(nbytes)
        np.asarray(memory).fill(7)
        return memory


class ZeroesLate(Device):
    """It queues the zeros on the current stream and does not wait for them."""

    def allocate(self, nbytes: int) -> SimulatedBuffer:
        memory = super().allocate(nbytes)
        if nbytes:
            self.current_stream().launch(lambda out: out.fill(0), writes=[memory])
        return memory


class SlicesAreCopies(Device):
    def allocate(self, nbytes: int) -> SimulatedBuffer:
        return CopiedSlices(self, super().allocate(nbytes)._memory)


class CopiedSlices(SimulatedBuffer):
    def __getitem__(self, span: slice, /) -> SimulatedBuffer:
        return SimulatedBuffer(self.device, self._memory[span].copy())


class ReadOnlyHostMemory(Device):
    def allocate_host(self, nbytes: int) -> memoryview:
        return super().allocate_host(nbytes).toreadonly()


class TypedHostMemory(Device):
    def allocate_host(self, nbytes: int) -> memoryview:
        return super().allocate_host(nbytes).cast("b")


class PinsACopy(Device):
    def pin(self, memory: memoryview) -> memoryview:
        return self.allocate_host(len(memory))


class PinsReadOnly(Device):
    def pin(self, memory: memoryview) -> memoryview:
        return super().pin(memory).toreadonly()


class PinsForEver(Device):
    def pin(self, memory: memoryview) -> memoryview:
        self.kept = super().pin(memory)
        return self.kept


class PinsNothing(Device):
    def pin(self, memory: memoryview) -> memoryview:
        return memory


class ViewsAreCopies(Device):
    def view(self, array: Any) -> SimulatedBuffer:
        return SimulatedBuffer(self, super().view(array)._memory.copy())


class ViewsAnything(Device):
    def view(self, array: Any) -> SimulatedBuffer:
        return array if isinstance(array, SimulatedBuffer) else self.allocate(8)


class ManyCurrentStreams(Device):
    def current_stream(self, of: Any = None) -> SimulatedStream:
        return self.stream()


class AnswersTooEarly(Device):
    def ask(self, event: SimulatedEvent) -> bool:
        super().ask(event)
        return True


class NeverAnswers(Device):
    def ask(self, event: SimulatedEvent) -> bool:
        super().ask(event)
        return False


class WorksInAnyOrder(Device):
    """Streams do not keep the order of their own work."""

    def _do_until(self, event: SimulatedEvent) -> None:
        queue = event.stream.queue
        if len(queue) > 2 and all(work.after is None for work in queue):
            queue.rotate(1)
        super()._do_until(event)


class HidesFailures(Device):
    ends = False

    def _require_working(self) -> None:
        if self.ends:
            super()._require_working()


class HidesFailuresFromQuestions(Device):
    def ask(self, event: SimulatedEvent) -> bool:
        return self._failure is not None or super().ask(event)


class HangsAfterFailures(Device):
    ends = False

    def _require_working(self) -> None:
        while self._failure is not None and not self.ends:
            time.sleep(0.01)
        super()._require_working()


class HasNoName(Device):
    def __init__(self) -> None:
        super().__init__()
        self.name = ""


def with_streams(streams: type[SimulatedStream]) -> Callable[[], SimulatedDevice]:
    def make() -> SimulatedDevice:
        device = Device.__new__(Device)
        device.streams = streams
        device.__init__()  # type: ignore[misc]
        return device

    make.__name__ = streams.__name__
    return make


WRONG: list[tuple[Callable[[], SimulatedDevice], str]] = [
    (with_streams(IgnoresEvents), "wrong|not all zero"),
    (with_streams(RecordsTooEarly), "wrong|not all zero"),
    (with_streams(RecordsNothing), "wrong|not all zero"),
    (with_streams(CopiesAtOnce), "wrong|not all zero"),
    (with_streams(CopiesFromTheHostAtOnce), "wrong|not all zero"),
    (with_streams(CopiesToTheHostAtOnce), "wrong|not all zero"),
    (with_streams(AddsAtOnce), "wrong|not all zero"),
    (with_streams(LastInFirstOut), "wrong|not all zero"),
    (with_streams(SynchronizesLess), "wrong|not all zero"),
    (with_streams(ForgetsTheLastByte), "wrong|not all zero"),
    (with_streams(AcceptsOtherSizes), "a copy of 8 bytes to 7 is no error"),
    (with_streams(AddsInSixteenBits), r"a sum of bfloat16: \d+ of \d+ are wrong"),
    (with_streams(RoundsHalvesAway), r"a cast from float32 to bfloat16: \d+ of \d+ are wrong"),
    (with_streams(MultipliesByTheReciprocal), r"a quotient of float32 by 3: \d+ of \d+ are wrong"),
    (with_streams(DividesAnything), "a quotient of float16 is no error"),
    (with_streams(LosesNaN), r"a cast from float32 to bfloat16: \d+ of \d+ are wrong, such as \[-inf\] for \[nan\]"),
    (with_streams(CastsAnything), "a cast from float16 to bfloat16 is no error"),
    (DirtyMemory, "new bytes on the device are not all zero"),
    (DirtyHostMemory, "new bytes on the host are not all zero"),
    (ZeroesLate, "wrong|not all zero"),
    (SlicesAreCopies, "wrong|not all zero"),
    (ReadOnlyHostMemory, "host memory is no flat writable view"),
    (TypedHostMemory, "host memory is no flat writable view"),
    (PinsACopy, "memory that was pinned and copied to"),
    (PinsReadOnly, "pinned memory is no flat writable view"),
    (PinsForEver, "memory of the host is not pinned, the 2. time that it is asked for"),
    (ViewsAreCopies, "a second view of the same array"),
    (ViewsAnything, "an object without memory could be viewed"),
    (ManyCurrentStreams, "what the current stream"),
    (AnswersTooEarly, "what was copied behind an event"),
    (NeverAnswers, "an event that has happened says that it has not"),
    (WorksInAnyOrder, "wrong|not all zero"),
    (HidesFailuresFromQuestions, r"is_done\(\) raises no error although the device has failed"),
    (HasNoName, "'' is not a kind of device"),
]


def test_right_devices_are_accepted() -> None:
    check(SimulatedDevice(7, number=12))
    check(Device())
    check_device(HostDevice(), make_array=lambda nbytes: np.zeros(nbytes // 4, np.float32), rounds=8, busy_bytes=64)


@pytest.mark.parametrize(("make", "said"), WRONG, ids=lambda value: getattr(value, "__name__", ""))
def test_a_device_that_is_wrong_is_refused(make: Callable[[], SimulatedDevice], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check(make())


def test_a_device_that_copies_what_is_not_pinned_notices_it() -> None:
    with pytest.raises(ValueError, match=r"^8191 bytes of the host's memory are not pinned for simulated:0"):
        check(PinsNothing())


def test_a_device_that_never_ends_its_work_is_shown_with_the_stack() -> None:
    device = SimulatedDevice()
    device.hold()
    with pytest.raises(TimeoutError, match=r"(?s)not every rank ended within 2 s.*synchronize"):
        check_device(device, busy_bytes=64, timeout_seconds=2.0)
    device.fail()  # ends the thread that waits


@pytest.mark.parametrize("make", [HidesFailures, HangsAfterFailures])
def test_a_device_that_hides_failures_or_hangs_after_them_is_refused(make: type[Any]) -> None:
    device = make()
    with pytest.raises(AssertionError, match=r"^a thread that waited for the device does not learn that it has failed$"):
        check_failure(CheckedDevice(device, 64), device.fail, within_seconds=0.2)
    device.ends = True
