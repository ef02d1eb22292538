"""The simulated device shows what is not ordered, and it fails, stops and takes time as a test asks."""

import threading
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from commsched.core.errors import UnsupportedError
from commsched.testing import SimulatedDevice, SimulatedFailure

SEEDS = range(20)


def floats(view: memoryview) -> NDArray[np.float32]:
    return np.frombuffer(view, np.float32)


def pinned(device: SimulatedDevice, *values: float) -> memoryview:
    memory = device.allocate_host(4 * len(values))
    floats(memory)[:] = values
    return memory


@pytest.mark.parametrize("seed", SEEDS)
def test_a_read_before_the_event_gives_nan_and_after_it_the_values(seed: int) -> None:
    device = SimulatedDevice(seed)
    stream, memory = device.stream(), device.allocate(8)
    back = pinned(device, 0, 0)
    stream.copy(memory, pinned(device, 1, 2))
    stream.copy(back, memory)
    event = stream.record()
    assert np.isnan(floats(back)).all()
    event.synchronize()
    assert list(floats(back)) == [1, 2]
    assert device.outstanding == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_that_does_not_wait_reads_nan(seed: int) -> None:
    """At least with those seeds by which the other stream's work is not done by chance."""
    device = SimulatedDevice(seed)
    kernels, copies, memory = device.stream(), device.stream(), device.allocate(8)
    kernels.launch(lambda out: out.view(np.float32).fill(3), writes=[memory])
    back = device.allocate_host(8)
    copies.copy(back, memory)
    copies.synchronize()
    happened_to_be_late = device.outstanding == 1
    assert np.isnan(floats(back)).all() or not happened_to_be_late


def test_most_seeds_do_no_other_work_first() -> None:
    def is_seen(seed: int) -> bool:
        device = SimulatedDevice(seed)
        device.stream().copy(device.allocate(4), pinned(device, 1))
        device.stream().synchronize()
        return device.outstanding == 1

    assert sum(map(is_seen, SEEDS)) >= len(SEEDS) // 2


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_that_waits_reads_the_values(seed: int) -> None:
    device = SimulatedDevice(seed)
    kernels, copies, memory = device.stream(), device.stream(), device.allocate(8)
    kernels.launch(lambda out: out.view(np.float32).fill(3), writes=[memory])
    copies.wait(kernels.record())
    back = device.allocate_host(8)
    copies.copy(back, memory)
    copies.synchronize()
    assert list(floats(back)) == [3, 3]


def test_a_source_that_is_overwritten_too_early_gives_what_it_was_overwritten_with() -> None:
    device = SimulatedDevice()
    stream, memory, source = device.stream(), device.allocate(4), pinned(device, 1)
    stream.copy(memory, source)
    floats(source)[:] = 9
    back = device.allocate_host(4)
    stream.copy(back, memory)
    stream.synchronize()
    assert list(floats(back)) == [9]


def test_memory_that_earlier_work_still_reads_keeps_its_values_until_then() -> None:
    device = SimulatedDevice()
    first, second, memory, host = device.stream(), device.stream(), device.allocate(4), pinned(device, 1)
    first.copy(memory, host)
    second.wait(first.record())
    second.copy(host, device.allocate(4))  # writes what the first copy reads
    assert list(floats(host)) == [1]
    second.synchronize()
    assert list(floats(host)) == [0]
    assert np.frombuffer(device.peek(memory), np.float32) == [1]


def test_the_host_reads_memory_by_copies_only() -> None:
    device = SimulatedDevice(number=3)
    memory = device.allocate(8)
    for read in (np.asarray, bytes, memoryview):
        with pytest.raises(TypeError):
            read(memory)
    with pytest.raises(ValueError, match=r"^8 bytes of the host's memory are not pinned for simulated:3$"):
        device.stream().copy(memory, memoryview(bytearray(8)))
    with pytest.raises(ValueError, match=r"^neither side of the copy is memory of simulated:3$"):
        device.stream().copy(device.allocate_host(8), device.allocate_host(8))
    with pytest.raises(ValueError, match=r"^<SimulatedBuffer of 8 bytes on simulated:0> is not memory of simulated:3$"):
        device.stream().copy(memory, SimulatedDevice().allocate(8))


def test_memory_is_pinned_once_and_until_its_last_view_is_gone() -> None:
    device, memory = SimulatedDevice(), memoryview(bytearray(8))
    there, stream = device.allocate(4), device.stream()
    part = device.pin(memory)[4:]
    with pytest.raises(UnsupportedError, match=r"^4 bytes of the host's memory are already pinned for simulated:0$"):
        device.pin(memory[:4])
    part[:] = b"1234"
    stream.copy(there, part)
    del part
    stream.synchronize()
    assert device.peek(there) == b"1234"
    with pytest.raises(ValueError, match=r"^4 bytes of the host's memory are not pinned for simulated:0$"):
        stream.copy(there, memory[4:])
    SimulatedDevice().pin(memory)
    with pytest.raises(UnsupportedError, match=r"^8 bytes of the host's memory are read-only, and not pinned for simulated:0$"):
        device.pin(memory.toreadonly())


def test_an_array_with_its_memory_can_be_viewed() -> None:
    device = SimulatedDevice()

    class Array:
        __simulated_memory__ = device.allocate(8)

    assert device.view(Array()) is Array.__simulated_memory__
    with pytest.raises(UnsupportedError, match=r"^a ndarray is not in the memory of simulated:0$"):
        device.view(np.zeros(2))


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_failure_is_raised_by_waits_and_calls(after: int) -> None:
    device = SimulatedDevice(1)
    stream, memory, host = device.stream(), device.allocate(4), device.allocate_host(4)
    events = []
    for _ in range(3):
        stream.copy(memory, host)
        events.append(stream.record())
    device.fail(after=after)
    with pytest.raises(SimulatedFailure, match=r"^simulated:0 failed$"):
        events[after].synchronize()
    for call in (stream.record, stream.synchronize, events[-1].is_done, lambda: stream.copy(memory, host)):
        with pytest.raises(SimulatedFailure):
            call()


def test_a_held_device_lets_waits_wait() -> None:
    device = SimulatedDevice()
    stream = device.stream()
    stream.copy(device.allocate(4), device.allocate_host(4))
    event, ended = stream.record(), threading.Event()
    device.hold()
    waits = threading.Thread(target=lambda: (event.synchronize(), ended.set()), daemon=True)
    waits.start()
    assert not any(event.is_done() for _ in range(50))
    assert not ended.is_set()
    device.resume()
    waits.join(60)
    assert ended.is_set()
    assert event.is_done()


def test_a_failure_ends_the_wait_for_a_held_device() -> None:
    device = SimulatedDevice()
    stream = device.stream()
    stream.copy(device.allocate(4), device.allocate_host(4))
    device.hold()
    threading.Timer(0.01, lambda: device.fail(MemoryError("no memory"))).start()
    with pytest.raises(MemoryError, match=r"^no memory$"):
        stream.synchronize()


def test_copies_of_one_direction_take_their_time_one_after_another() -> None:
    """Four copies of 10 ms, two in each direction, in four streams."""
    device = SimulatedDevice(copy_rate=1e8)
    streams, begin = [device.stream() for _ in range(4)], time.monotonic()
    for number, stream in enumerate(streams):
        pair = device.allocate(1_000_000), device.allocate_host(1_000_000)
        stream.copy(*(pair if number % 2 else pair[::-1]))
    for stream in streams:
        stream.synchronize()
    assert time.monotonic() - begin >= 0.0199


def test_each_thread_has_a_current_stream() -> None:
    device = SimulatedDevice()
    stream = device.stream()
    with device.using(stream):
        assert device.current_stream() is stream
        assert device.current_stream(device.stream()) is not stream
    assert device.current_stream() is device.current_stream() is not stream
