"""check_device: checks what every device must do. Needs no test framework. A failed check raises AssertionError.

Work is given to streams that are still busy with copies within the device. So a device that does work too early, or in another
order than streams and events say, shows wrong bytes.
"""

from __future__ import annotations

import mmap
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.device import Device, DeviceEvent, DeviceStream
from ..core.errors import UnsupportedError
from ..core.interfaces import Buffer
from ..core.manifest import ITEMSIZE
from .world import run_world

_Bytes = NDArray[np.uint8]

#: Copies within the device that keep a stream busy. For 8 of 64 MB an H100 takes half a millisecond, in which Python queues
#: a dozen more pieces of work.
_BUSY_COPIES = 8

_SIZES = (1, 3, 8, 1021, 65_536)


def check_device(
    device: Device,
    *,
    make_array: Callable[[int], Any] | None = None,
    break_device: Callable[[], object] | None = None,
    rounds: int = 50,
    busy_bytes: int = 1 << 26,
    timeout_seconds: float = 60.0,
) -> None:
    """Run all checks of this module.

    Args:
        device: the device to check.
        make_array: returns an engine's array of so many bytes on the device, for ``Device.view``. It may be filled on the
            device's current stream.
        break_device: makes the device fail. Without it, failures are not checked. It is called last, since a GPU that has
            failed is of no more use to this process.
        rounds: number of random programs in ``check_programs``.
        busy_bytes: size of the copies that keep a stream busy. A device that is late by itself needs hardly any.
        timeout_seconds: limit for each check.

    Raises:
        AssertionError: the device did something wrong; says what.
        TimeoutError: a check does not end. Shows its stack.
    """
    checked = CheckedDevice(device, busy_bytes)
    checks: list[Callable[[CheckedDevice], None]] = [
        check_memory,
        check_copies,
        check_pinning,
        check_stream,
        check_events,
        check_current_stream,
        lambda checked: check_programs(checked, rounds),
        check_threads,
        check_sums,
        check_quotients,
        check_casts,
        lambda checked: check_views(checked, make_array),
        check_mistakes,
    ]
    if break_device is not None:
        checks.append(lambda checked: check_failure(checked, break_device))
    for check in checks:
        run_world(1, lambda rank, check: check(checked), check, timeout_seconds=timeout_seconds)


class CheckedDevice:
    """A device, and what all checks do with it."""

    def __init__(self, device: Device, busy_bytes: int = 1 << 26) -> None:
        assert re.fullmatch(r"[a-z]+(:\d+)?", device.name), f"'{device.name}' is not a kind of device, or kind and number"
        self.device = device
        self._busy = device.allocate(busy_bytes), device.allocate(busy_bytes)

    def delay(self, stream: DeviceStream) -> None:
        """Keep ``stream`` busy for a while, by copies of bytes that nobody looks at."""
        for _ in range(_BUSY_COPIES):
            stream.copy(*self._busy)

    def busy_stream(self, priority: int = 0) -> DeviceStream:
        stream = self.device.stream(priority)
        self.delay(stream)
        return stream

    def on_host(self, values: _Bytes) -> memoryview:
        """``values`` in memory that the device copies."""
        memory = self.device.allocate_host(values.size)
        np.asarray(memory)[:] = values
        return memory

    def upload(self, values: NDArray[Any]) -> Buffer:
        """``values`` in the device's memory. Waits until they are there."""
        memory, stream = self.device.allocate(values.nbytes), self.device.stream()
        host = self.on_host(_bytes_of(values))
        stream.copy(memory, host)
        stream.synchronize()
        return memory

    def download(self, memory: Buffer, stream: DeviceStream | None = None) -> _Bytes:
        """What ``memory`` holds when all work queued on ``stream`` is done."""
        stream = self.device.stream() if stream is None else stream
        host = self.on_host(np.full(len(memory), 0xA5, np.uint8))
        stream.copy(host, memory)
        stream.record().synchronize()
        return np.array(host)


def check_memory(checked: CheckedDevice) -> None:
    """Memory is zero when it is allocated, also where other memory was before, and slices are views."""
    device = checked.device
    for nbytes in (0, *_SIZES):
        for _ in range(3):
            memory, host = device.allocate(nbytes), device.allocate_host(nbytes)
            assert len(memory) == nbytes, f"{nbytes} bytes were allocated, and len() is {len(memory)}"
            assert isinstance(host, memoryview), f"host memory is a {type(host).__name__}, not a memoryview"
            kind = (host.format, host.ndim, host.nbytes, host.c_contiguous, host.readonly)
            assert kind == ("B", 1, nbytes, True, False), f"host memory is no flat writable view of {nbytes} bytes: {kind}"
            assert not np.asarray(host).any(), f"{nbytes} new bytes on the host are not all zero"
            assert not checked.download(memory).any(), f"{nbytes} new bytes on the device are not all zero"
            np.asarray(host)[:] = 0x5A
            stream = device.stream()
            stream.copy(memory, host)
            stream.synchronize()
    # Another stream may use new memory at once. So the zeros may not come later.
    values, stream = _random_bytes(0, 1 << 16), device.stream()
    host = checked.on_host(values)
    checked.delay(device.current_stream())
    memory = device.allocate(values.size)
    stream.copy(memory, host)
    _require(checked.download(memory, stream), values, "memory that was used as soon as it was allocated")
    device.current_stream().synchronize()
    _require(checked.download(memory), values, "memory some time after it was allocated")
    # Slices.
    zeros = np.zeros(values.size, np.uint8)
    cleared = checked.upload(zeros)
    stream.copy(memory, cleared)
    stream.copy(memory[100:300][50:60], host[7:17])
    zeros[150:160] = values[7:17]
    _require(checked.download(memory, stream), zeros, "memory of which a slice of a slice was written")


def check_copies(checked: CheckedDevice) -> None:
    """Copies of all sizes and offsets are exact in each direction, and leave their neighbours alone."""
    device, chance = checked.device, random.Random(1)
    for nbytes in (0, *_SIZES):
        for inwards, outwards in ((True, False), (False, True), (False, False)):
            before, values, stream = _random_bytes(nbytes, nbytes + 64), _random_bytes(nbytes + 1, nbytes + 64), device.stream()
            at, source_at = chance.randrange(64), chance.randrange(64)
            source = checked.on_host(values) if inwards else checked.upload(values)
            target = checked.on_host(before) if outwards else checked.upload(before)
            stream.copy(target[at : at + nbytes], source[source_at : source_at + nbytes])
            stream.synchronize()
            expected = before.copy()
            expected[at : at + nbytes] = values[source_at : source_at + nbytes]
            got = np.asarray(target) if isinstance(target, memoryview) else checked.download(target)
            where = f"{'host' if inwards else 'device'} to {'host' if outwards else 'device'}"
            _require(got, expected, f"the memory around a copy of {nbytes} bytes from {where}")


def check_pinning(checked: CheckedDevice) -> None:
    """Memory of the host that exists is the device's to copy while it is pinned, and can be pinned again afterwards."""
    device, nbytes = checked.device, 2 * mmap.PAGESIZE
    memory = memoryview(mmap.mmap(-1, nbytes))
    for turn in range(3):
        values = _random_bytes(turn, nbytes)
        try:
            pinned = device.pin(memory)
        except UnsupportedError as error:
            raise AssertionError(
                f"memory of the host is not pinned, the {turn + 1}. time that it is asked for: {error}"
            ) from error
        kind = (pinned.format, pinned.ndim, pinned.nbytes, pinned.c_contiguous, pinned.readonly)
        assert kind == ("B", 1, nbytes, True, False), f"pinned memory is no flat writable view of {nbytes} bytes: {kind}"
        np.asarray(memory)[:] = values
        there, stream = device.allocate(nbytes), checked.busy_stream()
        stream.copy(there[1:], pinned[1:])
        stream.synchronize()
        np.asarray(memory)[:] = 0
        checked.delay(stream)
        stream.copy(pinned[1:], there[1:])
        stream.synchronize()
        _require(np.asarray(memory)[1:], values[1:], "memory that was pinned and copied to")
        del pinned  # no longer pinned


def check_stream(checked: CheckedDevice) -> None:
    """Work of one stream is done in the order in which it was queued."""
    device, length = checked.device, 40
    for priority in (0, -1, 1):
        stream = checked.busy_stream(priority)
        values = [_random_bytes(i, 4096) for i in range(length)]
        hosts, memory, scratch = [checked.on_host(each) for each in values], device.allocate(4096), device.allocate(4096)
        backs = [device.allocate_host(4096) for _ in values]
        for host, back in zip(hosts, backs):
            stream.copy(memory, host)
            stream.copy(scratch, memory)
            stream.add(scratch, memory, "uint8")
            stream.copy(back, scratch)
        stream.synchronize()
        for i, (back, each) in enumerate(zip(backs, values)):
            _require(np.asarray(back), each + each, f"the result of step {i} of a stream")


def check_events(checked: CheckedDevice) -> None:
    """When an event has happened, all work queued before it is done, whoever asks and however; a stream that waits for an
    event does its later work behind it."""
    device = checked.device
    for turn in range(30):
        values, producer, consumer = _random_bytes(turn, 4096), checked.busy_stream(), device.stream()
        host, memory, back = checked.on_host(values), device.allocate(4096), device.allocate_host(4096)
        producer.copy(memory, host)
        consumer.wait(producer.record())
        consumer.copy(back, memory)
        event = consumer.record()
        _WAITS[turn % len(_WAITS)](event)
        _require(np.asarray(back), values, "what was copied behind an event")
        event.synchronize()
        assert event.is_done(), "an event that has happened says that it has not"
        # An event keeps its place although its stream goes on.
        first = producer.record()
        checked.delay(producer)
        producer.copy(memory, back)
        first.synchronize()
        consumer.wait(first)
        consumer.synchronize()
        producer.synchronize()
    device.stream().record().synchronize()  # behind nothing


def _wait_by_thread(event: DeviceEvent) -> None:
    run_world(3, lambda rank: event.synchronize())


def _wait_by_asking(event: DeviceEvent) -> None:
    while not event.is_done():
        time.sleep(0)


_WAITS = (lambda event: event.synchronize(), _wait_by_asking, _wait_by_thread)


def check_current_stream(checked: CheckedDevice) -> None:
    """The current stream is a queue that stays the same, and it takes part in the order by events."""
    device, values = checked.device, _random_bytes(2, 4096)
    host, memory, back = checked.on_host(values), device.allocate(4096), device.allocate_host(4096)
    checked.delay(device.current_stream())
    device.current_stream().copy(memory, host)
    device.current_stream().copy(back, memory)
    device.current_stream().record().synchronize()
    _require(np.asarray(back), values, "what the current stream copied twice")
    for _ in range(5):
        values = values + np.uint8(1)
        np.asarray(host)[:] = values
        producer = checked.busy_stream()
        producer.copy(memory, host)
        device.current_stream().wait(producer.record())
        device.current_stream().copy(back, memory)
        device.current_stream().synchronize()
        _require(np.asarray(back), values, "what the current stream copied behind an event of another stream")


def check_programs(checked: CheckedDevice, rounds: int) -> None:
    """Random work on several streams, ordered by events wherever two pieces of work touch the same memory, has the result of
    the same work done one after another."""
    for seed in range(rounds):
        _Program(checked, seed).run()


class _Program:
    """Random work on four streams, some memory of the device and some of the host."""

    NBYTES = 2048

    def __init__(self, checked: CheckedDevice, seed: int) -> None:
        self._checked = checked
        self._seed = seed
        self._chance = random.Random(seed)
        self._streams = [checked.device.stream(priority) for priority in (0, 0, -1, -1)]
        self._expected = [_random_bytes(seed + i, self.NBYTES) for i in range(8)]
        self._memory: list[Any] = [checked.upload(values) for values in self._expected[:4]]
        self._memory += [checked.on_host(values) for values in self._expected[4:]]
        self._users: list[list[tuple[bool, DeviceEvent]]] = [[] for _ in self._memory]  # (writes, event behind it)

    def run(self) -> None:
        for stream in self._streams:
            self._checked.delay(stream)
        for _ in range(40):
            self._work() if self._chance.random() < 0.9 else self._write_on_host()
        for place, memory in enumerate(self._memory):
            self._settle(place, writes=False)
            got = np.asarray(memory) if isinstance(memory, memoryview) else self._checked.download(memory)
            _require(got, self._expected[place], f"memory {place} at the end of random program {self._seed}")
        for stream in self._streams:
            stream.synchronize()

    def _work(self) -> None:
        stream = self._chance.choice(self._streams)
        target, source = self._chance.sample(range(8), 2)
        if target >= 4 and source >= 4:
            source -= 4
        start, stop = sorted(self._chance.sample(range(self.NBYTES + 1), 2))
        adds = target < 4 and source < 4 and self._chance.random() < 0.5
        for place, writes in ((target, True), (source, False)):
            for wrote, event in self._users[place]:
                if writes or wrote:
                    stream.wait(event)
        if adds:
            stream.add(self._memory[target][start:stop], self._memory[source][start:stop], "uint8")
            self._expected[target][start:stop] += self._expected[source][start:stop]
        else:
            stream.copy(self._memory[target][start:stop], self._memory[source][start:stop])
            self._expected[target][start:stop] = self._expected[source][start:stop]
        event = stream.record()
        self._users[target] = [(True, event)]
        self._users[source].append((False, event))

    def _write_on_host(self) -> None:
        place = self._chance.randrange(4, 8)
        self._settle(place, writes=True)
        values = _random_bytes(self._chance.randrange(1 << 30), self.NBYTES)
        np.asarray(self._memory[place])[:] = values
        self._expected[place] = values.copy()

    def _settle(self, place: int, *, writes: bool) -> None:
        """Wait until the host may use that memory."""
        for wrote, event in self._users[place]:
            if writes or wrote:
                event.synchronize()


def check_threads(checked: CheckedDevice) -> None:
    """Threads that have streams of their own do not disturb each other."""

    def body(rank: int) -> None:
        stream, memory = checked.device.stream(), checked.device.allocate(4096)
        for turn in range(50):
            values = _random_bytes(100 * rank + turn, 4096)
            host = checked.on_host(values)
            stream.copy(memory, host)
            _require(checked.download(memory, stream), values, f"what thread {rank} copied")

    run_world(4, body)


def check_sums(checked: CheckedDevice) -> None:
    """Sums of elements have the bits that the dtype's arithmetic says, in order with other work of the stream."""
    for dtype in ITEMSIZE:
        one, other = (_random_numbers(seed, dtype) for seed in (1, 2))
        stream, into, values = checked.busy_stream(), checked.upload(one), checked.upload(other)
        stream.add(into, values, dtype)
        got = checked.download(into, stream)
        with np.errstate(all="ignore"):
            if dtype == "bfloat16":
                expected: NDArray[Any] = _to_bfloat16(_from_bfloat16(one) + _from_bfloat16(other))
            elif dtype == "float16":
                expected = (one.astype(np.float32) + other.astype(np.float32)).astype(np.float16)
            else:
                expected = one + other
        _require_numbers(got, expected, dtype, f"a sum of {dtype}")


def check_quotients(checked: CheckedDevice) -> None:
    """Quotients are rounded to nearest even. A product with a rounded reciprocal is not."""
    for dtype in ("float32", "float64"):
        numbers = _random_numbers(5, dtype)
        for by in (1, 2, 3, 7, 49):
            stream, values = checked.busy_stream(), checked.upload(numbers)
            stream.divide(values, by, dtype)
            with np.errstate(all="ignore"):
                _require_numbers(checked.download(values, stream), numbers / by, dtype, f"a quotient of {dtype} by {by}")


def check_casts(checked: CheckedDevice) -> None:
    """Every 16-bit float becomes the float32 of the same value; a float32 becomes the nearest 16-bit float, or of two the even
    one."""
    every = np.arange(1 << 16, dtype=np.uint16)
    floats = _random_numbers(3, "float32")
    for dtype in ("float16", "bfloat16"):
        halves: NDArray[Any] = every if dtype == "bfloat16" else every.view(np.float16)
        with np.errstate(all="ignore"):
            widened = _from_bfloat16(every) if dtype == "bfloat16" else halves.astype(np.float32)
            # Also all numbers half way between two neighbours, and those just beside.
            middles = (widened[:-1].astype(np.float64) + widened[1:]) / 2
            numbers = np.concatenate([floats, *(_nudged(middles.astype(np.float32), by) for by in (-1, 0, 1))])
            narrowed = _to_bfloat16(numbers) if dtype == "bfloat16" else numbers.astype(np.float16)
        for source, from_, target, to in ((halves, dtype, widened, "float32"), (numbers, "float32", narrowed, dtype)):
            stream, here, there = checked.busy_stream(), checked.upload(source), checked.device.allocate(target.nbytes)
            stream.cast(there, to, here, from_)
            _require_numbers(checked.download(there, stream), target, to, f"a cast from {from_} to {to}")


def check_views(checked: CheckedDevice, make_array: Callable[[int], Any] | None = None) -> None:
    """A view of an array is its memory. What has no memory on the device is refused by the name of its type."""

    class Stranger:
        pass

    device = checked.device
    try:
        device.view(Stranger())
        said = ""
    except UnsupportedError as error:
        said = str(error)
    assert said, "an object without memory could be viewed"
    assert "Stranger" in said, f"the error does not name the type of what cannot be viewed: {said}"
    if make_array is not None:
        array, values, stream = make_array(4096), _random_bytes(4, 4096), device.stream()
        device.current_stream().synchronize()  # the array may have been filled there
        host = checked.on_host(values)
        assert len(device.view(array)) == 4096, f"the view of an array of 4096 bytes has {len(device.view(array))}"
        stream.copy(device.view(array), host)
        _require(checked.download(device.view(array), stream), values, "a second view of the same array")


def check_mistakes(checked: CheckedDevice) -> None:
    """Mistakes of the caller are errors at once, and change nothing."""
    device = checked.device
    stream, memory, host = device.stream(), device.allocate(8), device.allocate_host(8)
    mistakes: dict[str, Callable[[], object]] = {
        "copy of 8 bytes to 7": lambda: stream.copy(memory[:7], host),
        "copy of an object without memory": lambda: stream.copy(memory, object()),  # type: ignore[arg-type]
        "copy to an object without memory": lambda: stream.copy(object(), memory),  # type: ignore[arg-type]
        "sum of 8 bytes and 4": lambda: stream.add(memory, device.allocate(4), "uint8"),
        "sum of 6 bytes of float32": lambda: stream.add(memory[:6], device.allocate(6), "float32"),
        "quotient of float16": lambda: stream.divide(memory, 2, "float16"),
        "quotient of 6 bytes of float32": lambda: stream.divide(memory[:6], 2, "float32"),
        "cast from float64": lambda: stream.cast(memory[:4], "float32", memory, "float64"),
        "cast from float16 to bfloat16": lambda: stream.cast(device.allocate(8), "bfloat16", memory, "float16"),
        "cast of 2 float16 to 1 float32": lambda: stream.cast(device.allocate(4), "float32", memory[:4], "float16"),
    }
    for name, mistake in mistakes.items():
        try:
            mistake()
        except (TypeError, ValueError):
            continue
        raise AssertionError(f"a {name} is no error")
    assert not checked.download(memory, stream).any(), "a call that raised an error has changed memory"


def check_failure(checked: CheckedDevice, break_device: Callable[[], object], *, within_seconds: float = 20.0) -> None:
    """After a failure every wait and every question raises an error, and a wait that has begun ends ``within_seconds``."""
    device = checked.device
    stream, memory, host = checked.busy_stream(), device.allocate(4096), device.allocate_host(4096)
    stream.copy(memory, host)
    event, begun, errors = stream.record(), threading.Event(), list[Exception]()

    def wait() -> None:
        begun.set()
        try:
            while True:
                checked.delay(stream)
                stream.record().synchronize()
        except Exception as error:
            errors.append(error)

    waiting = threading.Thread(target=wait, name="commsched-check-wait", daemon=True)
    waiting.start()
    begun.wait()
    break_device()
    waiting.join(within_seconds)
    assert errors, "a thread that waited for the device does not learn that it has failed"

    def copy() -> None:
        stream.copy(memory, host)
        stream.synchronize()

    calls: dict[str, Callable[[], object]] = {
        "synchronize() of an event": event.synchronize,
        "is_done()": event.is_done,
        "synchronize() of a stream": stream.synchronize,
        "a copy, or the wait for it,": copy,
    }
    for name, call in calls.items():
        try:
            call()
        except Exception:
            continue
        raise AssertionError(f"{name} raises no error although the device has failed")


def _random_bytes(seed: int, nbytes: int) -> _Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def _random_numbers(seed: int, dtype: str) -> NDArray[Any]:
    """Numbers of every kind: all exponents, infinities and NaN, in random order. bfloat16 is their bits."""
    bits = _random_bytes(seed, ITEMSIZE[dtype] * 50_021)
    return bits.view(np.uint16 if dtype == "bfloat16" else dtype)


def _bytes_of(values: NDArray[Any]) -> _Bytes:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, or of two the even one, found by comparing distances."""
    down = (values.view(np.uint32) >> 16).astype(np.uint16)  # towards zero
    up = down + np.uint16(1)  # away from zero; beyond the largest number it is the infinity
    exact = values.astype(np.float64)
    low = _from_bfloat16(down).astype(np.float64)
    step = np.abs(low - _from_bfloat16(down ^ np.uint16(1)))  # between neighbours of one exponent
    step = np.where(np.isfinite(step), step, 2.0**120)  # between the largest number and the infinity
    rest = np.abs(exact - low)
    goes_up = (rest > step / 2) | ((rest == step / 2) & (down % 2 == 1))
    return np.where(np.isnan(values), np.uint16(0x7FC0), np.where(goes_up & np.isfinite(values), up, down))


def _nudged(values: NDArray[np.float32], by: int) -> NDArray[np.float32]:
    return np.nextafter(values, np.float32(by * np.inf)) if by else values


def _require(got: _Bytes, expected: _Bytes, what: str) -> None:
    wrong = np.flatnonzero(got != expected)
    assert not wrong.size, f"{what}: {wrong.size} of {got.size} bytes are wrong, the first at {wrong[0]}"


def _require_numbers(got: _Bytes, expected: NDArray[Any], dtype: str, what: str) -> None:
    """Require the same bits, and any NaN where a NaN is expected."""
    numbers = got.view(expected.dtype)
    values, wanted = (_from_bfloat16(each) if dtype == "bfloat16" else each for each in (numbers, expected))
    bits = f"u{expected.itemsize}"
    wrong = np.flatnonzero((numbers.view(bits) != expected.view(bits)) & ~(_is_nan(values) & _is_nan(wanted)))
    first = wrong[:1]
    assert not wrong.size, f"{what}: {wrong.size} of {numbers.size} are wrong, such as {values[first]} for {wanted[first]}"


def _is_nan(values: NDArray[Any]) -> NDArray[np.bool_]:
    result: NDArray[np.bool_] = values != values
    return result
