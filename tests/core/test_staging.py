"""Gradients on a device travel from the host's memory: what waits for what, in which order copies go, and how it ends."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from commsched.core import staging
from commsched.core.core import Core
from commsched.core.errors import ClosedError, CommschedError, TransportError, UnsupportedError
from commsched.core.interfaces import Observer
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.scheduler import SchedulerConfig
from commsched.core.stalls import StepOfGroup, progress_of
from commsched.core.task import CommTask
from commsched.testing.simulated_device import SimulatedBuffer, SimulatedDevice
from tests.recording_transport import RecordingTransport

TENSORS = 4
MANIFEST = Manifest(tuple(TensorSpec(f"layer{index}", (8,), "uint8") for index in range(TENSORS)))
ALL_AT_ONCE = SchedulerConfig(partition_bytes=8, credit_bytes=1000)


class Manual(threading.Event):
    """An event that the test lets happen."""

    def synchronize(self) -> None:
        assert self.wait(60)


class Broken:
    def synchronize(self) -> None:
        raise RuntimeError("an illegal memory access")


class World(Observer):
    """A core of rank 0 of two, with a group on a device. The test brings the averages."""

    def __init__(self, config: SchedulerConfig = ALL_AT_ONCE, partition_bytes: int = 8, seed: int = 0, **device: Any) -> None:
        self.device = SimulatedDevice(seed, **device)
        self.transport = RecordingTransport()
        self.failures: SimpleQueue[CommschedError] = SimpleQueue()
        self.core = Core(self.transport, config, on_failure=self._failed, observer=self)
        self.partition_bytes = partition_bytes
        self.stream = self.device.stream()
        self.buffer = self.device.allocate(8 * TENSORS)
        self.group: staging.StagedGroup = self.add_group(self.buffer)
        self.tasks: list[CommTask] = []
        self.ready: list[tuple[int, float]] = []

    def _failed(self, error: CommschedError) -> None:
        self.failures.put(error)
        self.core.fail(error)

    def add_group(self, buffer: SimulatedBuffer) -> staging.StagedGroup:
        group = self.core.add_group(cut(MANIFEST, self.partition_bytes), {"uint8": buffer}, device=self.device)
        assert isinstance(group, staging.StagedGroup)
        return group

    def on_ready(self, group: int, tensor: int, at: float) -> None:
        self.ready.append((tensor, at))

    def on_task(self, task: CommTask) -> None:
        self.tasks.append(task)

    def place(self, tensor: int, buffer: SimulatedBuffer | None = None) -> SimulatedBuffer:
        return (buffer or self.buffer)[8 * tensor : 8 * tensor + 8]

    def write(self, tensor: int, value: int, stream: Any = None) -> Any:
        """Queue the kernel that makes a gradient, and return the event behind it."""
        stream = stream or self.stream
        stream.launch(lambda gradient: gradient.fill(value), writes=[self.place(tensor)])
        return stream.record()

    def submit(self, tensor: int, value: int) -> None:
        self.group.notify_ready(tensor, self.write(tensor, value))

    def average(self, task: CommTask, value: int) -> None:
        """The average of ``task`` arrives."""
        task.data[:] = bytes([value]) * task.nbytes
        self.transport.done(task)

    def hold_all_copies_back(self) -> None:
        """A step of which all averages arrive, while the device does nothing."""
        self.group.begin_step()
        for tensor in range(TENSORS):
            self.submit(tensor, 3)
        started = self.transport.wait_started(TENSORS)
        self.device.hold()
        for task in started:
            self.average(task, 6)

    def read(self, tensor: int) -> int:
        """What work in the stream finds in the memory of ``tensor`` from now on."""
        there = self.device.allocate_host(8)
        self.stream.copy(there, self.place(tensor))
        self.stream.synchronize()
        assert len(set(there)) == 1
        return there[0]

    def step(self, value: int) -> list[CommTask]:
        """A step in which every gradient is ``value`` and every average twice that, until the copies of these are queued."""
        self.group.begin_step(self.stream)
        before = len(self.transport.started)
        for tensor in reversed(range(TENSORS)):
            self.submit(tensor, value)
        started = self.transport.wait_started(before + len(self.group.plan.partitions))[before:]
        for task in started:
            assert bytes(task.data) == bytes([value]) * task.nbytes
            self.average(task, 2 * value)
        return started


@pytest.fixture
def open_world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(*arguments: Any, **options: Any) -> World:
        worlds.append(World(*arguments, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.device.resume()
        world.core.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("commsched-")]


@pytest.fixture
def world(open_world: Callable[..., World]) -> World:
    return open_world()


def order(tasks: list[CommTask]) -> list[int]:
    return [task.partition.index for task in tasks]


def copies_out(world: World) -> list[int]:
    """The tensors whose copies to the host are queued, one by one; a list that grows."""
    stream = world.group.staging._to_host
    queued: list[int] = []
    copy = stream.copy

    def recorded(target: Any, source: Any) -> None:
        address = np.asarray(target).ctypes.data - np.asarray(world.group.buffers["uint8"]).ctypes.data
        queued.append(address // 8)
        copy(target, source)

    stream.copy = recorded  # type: ignore[method-assign]
    return queued


def waits(seconds: float = 0.02) -> None:
    """Give other threads the time to do what they must not do."""
    threading.Event().wait(seconds)


def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        waits(0.01)
    assert condition()


# --- to the host ---


@pytest.mark.parametrize("partition_bytes", [3, 8, 16, 32])
@pytest.mark.parametrize("seed", range(4))
def test_averages_come_back_step_after_step(open_world: Callable[..., World], seed: int, partition_bytes: int) -> None:
    world = open_world(partition_bytes=partition_bytes, seed=seed)
    for step in range(1, 20):
        world.step(step)
        for tensor in range(TENSORS):
            world.group.proxies[tensor].wait(world.stream)
            assert world.read(tensor) == 2 * step


def test_a_gradient_is_copied_when_its_kernel_is_done(world: World) -> None:
    world.group.begin_step()
    done = Manual()
    world.write(3, 7).synchronize()
    world.group.notify_ready(3, done)
    world.write(3, 9).synchronize()  # by what happens before the event
    done.set()
    [task] = world.transport.wait_started(1)
    assert bytes(task.data) == bytes([9]) * 8


def test_a_partition_waits_for_all_its_gradients(open_world: Callable[..., World]) -> None:
    world = open_world(partition_bytes=16)
    world.group.begin_step()
    late = Manual()
    world.group.notify_ready(1, late)
    world.submit(0, 5)  # by a stream that is ahead of the other
    waits()
    assert world.transport.started == []
    world.write(1, 6).synchronize()
    late.set()
    [task] = world.transport.wait_started(1)
    assert bytes(task.data) == bytes([5] * 8 + [6] * 8)


def test_copies_take_the_order_of_the_policy_and_wait_in_the_host(
    open_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "MAX_BYTES_IN_FLIGHT", 16)
    world = open_world()
    copies = copies_out(world)
    world.group.begin_step()
    world.device.hold()
    for tensor in (3, 2, 1, 0):
        world.group.notify_ready(tensor)
    eventually(lambda: len(world.group.staging._waiting) == 2)
    assert world.device.outstanding == 2  # tensors 3 and 2: a more urgent gradient waits for no more than these
    world.device.resume()
    world.transport.wait_started(4)
    assert copies == [3, 2, 0, 1]


def test_a_new_policy_is_that_of_copies_too(open_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "MAX_BYTES_IN_FLIGHT", 8)
    world = open_world()
    copies = copies_out(world)
    world.core.switch_at(SchedulerConfig(8, 1000, "fifo"), {0: 0})
    world.group.begin_step()
    world.device.hold()
    for tensor in (3, 1, 2, 0):
        world.group.notify_ready(tensor)
    eventually(lambda: len(world.group.staging._waiting) == 3)
    world.device.resume()
    world.transport.wait_started(4)
    assert copies == [3, 1, 2, 0]


def test_credit_counts_the_network_only(open_world: Callable[..., World]) -> None:
    world = open_world(SchedulerConfig(partition_bytes=8, credit_bytes=8))
    world.group.begin_step()
    for tensor in (3, 2, 1, 0):
        world.submit(tensor, 5 + tensor)
    world.transport.wait_started(1)
    expected = b"".join(bytes([5 + tensor]) * 8 for tensor in range(TENSORS))
    eventually(lambda: bytes(world.group.buffers["uint8"]) == expected)
    assert len(world.transport.started) == 1


def test_a_gradient_is_ready_for_observers_when_its_kernel_is_done(world: World) -> None:
    world.group.begin_step()
    done = Manual()
    world.group.notify_ready(2, done)
    waits()
    assert world.ready == []
    world.device.hold()
    done.set()
    eventually(lambda: bool(world.ready))
    waits()
    world.device.resume()
    [task] = world.transport.wait_started(1)
    [(tensor, at)] = world.ready
    assert tensor == 2
    assert task.ready_at == at  # when the gradient was made, and not when it was copied
    assert task.started_at > task.ready_at + 0.01


def test_a_rank_is_late_with_what_its_device_has_not_made(world: World) -> None:
    world.group.begin_step()
    done = Manual()
    for tensor in range(TENSORS):
        world.group.notify_ready(tensor, done if tensor == 2 else None)
    assert world.group.missing() == []
    world.transport.wait_started(2)
    assert world.core._progress_of(StepOfGroup(0, 0, 2)) == progress_of(["layer2"], ["layer3"])  # whose event is behind it
    done.set()
    for task in world.transport.wait_started(4):
        world.average(task, 1)
    assert world.core._progress_of(StepOfGroup(0, 0, 2)) == progress_of([], [])
    world.group.begin_step()
    others = [f"layer{tensor}" for tensor in range(TENSORS) if tensor != 2]
    assert world.core._progress_of(StepOfGroup(0, 1, 2)) == progress_of(["layer2"], others)


def test_mistakes_of_the_engine_are_told_at_once(world: World) -> None:
    world.group.begin_step()
    world.submit(1, 1)
    with pytest.raises(ValueError, match="tensor 'layer1' was notified twice in step 0"):
        world.group.notify_ready(1)
    with pytest.raises(ValueError, match="there is no tensor 4"):
        world.group.notify_all_ready([0, 4])  # the first counts
    for wrong in (4, -1):
        with pytest.raises(ValueError, match=f"there is no tensor {wrong}"):
            world.group.notify_ready(wrong)
    assert sorted(order(world.transport.wait_started(2))) == [0, 1]
    world.submit(2, 1)
    world.transport.wait_started(3)
    assert {tensor for tensor, _ in world.ready} == {0, 1, 2}  # observers learn of no others
    assert world.core._progress_of(StepOfGroup(0, 0, 2)) == progress_of([], ["layer3"])


def test_devices_that_are_equal_share_threads_and_copies(world: World) -> None:
    class Another(SimulatedDevice):
        def __eq__(self, other: object) -> bool:
            return other is world.device

        def __hash__(self) -> int:
            return hash(world.device)

    group = world.core.add_group(cut(MANIFEST, 8), {"uint8": world.device.allocate(32)}, device=Another())
    assert isinstance(group, staging.StagedGroup)
    assert group.staging is world.group.staging


# --- to the device ---


def test_a_proxy_opens_at_once_and_the_stream_waits(world: World) -> None:
    world.group.begin_step()
    world.submit(0, 5)
    [task] = world.transport.wait_started(1)
    world.device.hold()
    world.average(task, 8)
    assert world.group.proxies[0].is_open
    world.group.proxies[0].wait(world.stream)  # the host does not wait
    assert world.device.outstanding == 1
    world.device.resume()
    assert world.read(0) == 8


def test_without_a_stream_the_host_waits(world: World) -> None:
    world.group.begin_step()
    world.submit(0, 5)
    world.average(world.transport.wait_started(1)[0], 8)
    world.group.proxies[0].wait()
    assert world.device.peek(world.place(0)) == bytes([8]) * 8


def test_a_tensor_of_several_partitions_waits_for_all_its_copies(open_world: Callable[..., World]) -> None:
    for seed in range(10):
        world = open_world(partition_bytes=3, seed=seed)
        world.step(3)
        world.group.proxies[1].wait(world.stream)
        assert world.read(1) == 6


def test_the_mirror_is_the_memory_that_the_transport_gives_and_an_average_may_lie_elsewhere(world: World) -> None:
    mirror, elsewhere = world.device.allocate_host(8 * TENSORS), world.device.allocate_host(8)
    asked: list[object] = []

    def give(group: int, manifest: Manifest, device: object) -> dict[str, memoryview]:
        asked.extend((group, manifest, device))
        return {"uint8": mirror}

    world.transport.mirror = give  # type: ignore[method-assign, assignment]
    world.group = world.add_group(world.buffer)
    assert asked == [1, MANIFEST, world.device]
    world.group.begin_step(world.stream)
    world.submit(2, 5)
    [task] = world.transport.wait_started(1)
    assert bytes(mirror) == bytes(16) + b"\5" * 8 + bytes(8)
    task.data = elsewhere
    world.average(task, 7)
    world.group.proxies[2].wait(world.stream)
    assert world.read(2) == 7
    assert bytes(mirror[16:24]) == b"\5" * 8


def test_a_transport_that_has_no_memory_for_the_mirror_ends_the_job(world: World) -> None:
    def give(*arguments: object) -> None:
        raise TransportError("no memory")

    world.transport.mirror = give  # type: ignore[method-assign]
    with pytest.raises(TransportError, match=r"^no memory$"):
        world.add_group(world.buffer)
    assert str(world.failures.get(timeout=60)) == "no memory"


def test_a_reduce_scatter_is_not_copied_back(open_world: Callable[..., World]) -> None:
    world = open_world(SchedulerConfig(partition_bytes=8, credit_bytes=1000, collective="rsag"))
    world.group.begin_step()
    world.submit(0, 5)
    scatter = world.transport.wait_started(1)[0]
    world.device.hold()
    world.average(scatter, 99)
    gather = world.transport.wait_started(2)[1]
    assert world.device.outstanding == 0
    assert gather.data is scatter.data
    world.average(gather, 8)
    world.device.resume()
    world.group.proxies[0].wait(world.stream)
    assert world.read(0) == 8


@pytest.mark.parametrize("seed", range(10))
def test_a_gradient_is_not_written_before_an_average_that_nobody_read(open_world: Callable[..., World], seed: int) -> None:
    world = open_world(seed=seed)
    for value in (3, 4, 5):  # each step checks that what travels is its gradient
        world.step(value)


def test_a_group_without_tensors_has_steps(world: World) -> None:
    group = world.core.add_group(cut(Manifest(()), 8), {}, device=world.device)
    assert [group.begin_step(world.stream), group.begin_step()] == [0, 1]


def test_begin_step_waits_itself_without_a_stream(world: World) -> None:
    world.step(3)
    world.group.begin_step()
    assert world.device.outstanding == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_mirror_is_not_overwritten_while_an_average_is_copied_from_it(open_world: Callable[..., World], seed: int) -> None:
    """Not even if a gradient is written without the engine's stream."""
    world = open_world(seed=seed)
    world.hold_all_copies_back()
    world.group.begin_step(world.stream)
    world.group.notify_ready(0)
    waits()
    world.device.resume()
    task = world.transport.wait_started(TENSORS + 1)[-1]
    assert bytes(task.data) == bytes([6]) * 8


# --- failures ---


def failure_of(world: World) -> CommschedError:
    return world.failures.get(timeout=60)


def test_a_kernel_that_fails_ends_the_job_by_name(world: World) -> None:
    world.group.begin_step()
    world.group.notify_ready(2, Broken())
    error = failure_of(world)
    assert isinstance(error, TransportError)
    where = "rank 0: simulated:0 failed while it computed the gradient of 'layer2' in step 0"
    assert str(error) == f"{where}: RuntimeError: an illegal memory access"
    assert (error.rank, error.step, error.tensor) == (0, 0, "layer2")
    with pytest.raises(TransportError, match="an illegal memory access"):
        world.group.proxies[2].wait()


@pytest.mark.parametrize("queued", [True, False], ids=["under way", "when it is queued"])
def test_a_copy_to_the_host_that_fails_ends_the_job_by_name(world: World, queued: bool) -> None:
    world.group.begin_step()
    world.write(1, 3).synchronize()
    if queued:
        world.device.hold()
        world.group.notify_ready(1)
        waits()
        world.device.fail(RuntimeError("it fell off the bus"))
    else:
        world.device.fail(RuntimeError("it fell off the bus"))
        world.group.notify_ready(1)
    where = "rank 0: simulated:0 failed while it sent the host the gradient of 'layer1' in step 0"
    what = f"{where}: RuntimeError: it fell off the bus"
    assert str(failure_of(world)) == what
    with pytest.raises(TransportError, match=re.escape(what)):
        world.core.drain()


@pytest.mark.parametrize("queued", [True, False], ids=["under way", "when it is queued"])
def test_a_copy_to_the_device_that_fails_ends_the_job_by_name(world: World, queued: bool) -> None:
    world.group.begin_step()
    world.submit(1, 3)
    [task] = world.transport.wait_started(1)
    if queued:
        world.device.hold()
        world.average(task, 5)
        world.device.fail(RuntimeError("it fell off the bus"))
    else:
        world.device.fail(RuntimeError("it fell off the bus"))
        world.average(task, 5)
    what = "rank 0: simulated:0 failed while it received the average of 'layer1' in step 0: RuntimeError: it fell off the bus"
    assert str(failure_of(world)) == what
    for stream in (None, world.stream):
        with pytest.raises(TransportError, match=re.escape(what)):
            world.group.proxies[1].wait(stream)


def test_a_device_that_has_failed_between_two_steps_ends_the_job_by_name(world: World) -> None:
    world.step(3)
    world.core.drain()
    world.device.fail(RuntimeError("it fell off the bus"))
    with pytest.raises(TransportError, match=r"simulated:0 failed while it .*: RuntimeError: it fell off the bus"):
        world.group.begin_step(world.stream)


# --- the end ---


def test_drain_waits_for_kernels_and_copies(world: World) -> None:
    world.group.begin_step()
    done = Manual()
    for tensor in range(TENSORS):
        world.group.notify_ready(tensor, done)
    drained = threading.Event()

    def drain() -> None:
        world.core.drain()
        drained.set()

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    waits()
    assert not drained.is_set()
    done.set()
    for task in world.transport.wait_started(TENSORS):
        world.device.hold()
        world.average(task, 1)
    waits()
    assert not drained.is_set()  # the averages are not on the device
    world.device.resume()
    assert drained.wait(60)
    assert world.device.peek(world.buffer) == bytes([1]) * 32
    thread.join()


def test_drain_raises_the_failure_of_a_copy(world: World) -> None:
    world.hold_all_copies_back()
    thread = threading.Timer(0.05, world.device.fail)
    thread.start()
    with pytest.raises(TransportError, match="simulated:0 failed while it received the average of"):
        world.core.drain()
    thread.join()


def test_drain_raises_a_failure_of_the_job_while_the_device_hangs(world: World) -> None:
    world.hold_all_copies_back()
    told: SimpleQueue[BaseException] = SimpleQueue()

    def drain() -> None:
        try:
            world.core.drain()
        except TransportError as error:
            told.put(error)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    waits()
    world.core.fail(TransportError("rank 1 is gone"))
    assert str(told.get(timeout=60)) == "rank 1 is gone"
    thread.join()
    world.device.resume()


def test_nothing_is_written_after_the_close(world: World) -> None:
    world.group.begin_step()
    world.submit(0, 3)
    world.submit(1, 3)
    first, second = world.transport.wait_started(2)
    world.average(first, 5)
    world.core.close()
    assert world.device.outstanding == 0  # the copy that was under way is done
    world.average(second, 7)
    assert world.device.outstanding == 0
    assert world.device.peek(world.place(second.partition.index)) == bytes([3]) * 8
    assert not world.group.proxies[second.partition.index].is_open
    with pytest.raises(ClosedError):
        world.group.proxies[second.partition.index].wait()


def test_the_close_does_not_wait_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CLOSE_SECONDS", 0.05)
    world.group.begin_step()
    stuck = Manual()
    world.group.notify_ready(0, stuck)
    world.core.close()
    assert world.transport.started == []
    stuck.set()
    for thread in threading.enumerate():
        if thread.name == "commsched-gradients":
            thread.join(60)
    assert world.device.outstanding == 0


def test_a_group_may_be_released_while_its_gradients_are_on_their_way(world: World) -> None:
    world.group.begin_step()
    done = Manual()
    for tensor in range(TENSORS):
        world.group.notify_ready(tensor, done)
    world.group.release()
    waits()
    assert world.transport.released == []
    done.set()
    for task in world.transport.wait_started(TENSORS):
        world.average(task, 1)
    eventually(lambda: world.transport.released == [0])


def test_a_copy_keeps_what_it_uses_though_the_group_is_released(world: World) -> None:
    def staged_tasks() -> int:
        gc.collect()
        return sum(type(each) is staging.StagedTask for each in gc.get_objects())

    before = staged_tasks()
    world.group.begin_step()
    for tensor in range(TENSORS):
        world.submit(tensor, 1)
    world.transport.wait_started(TENSORS)
    world.device.hold()
    for task in world.transport.started:
        world.average(task, 1)
    world.group.release()
    for holder in (world.transport.started, world.transport._completions, world.tasks):
        holder.clear()
    del task
    assert staged_tasks() >= before + TENSORS
    world.device.resume()
    eventually(lambda: staged_tasks() == before)


def test_two_groups_of_a_device_share_its_threads_and_a_host_needs_none(world: World) -> None:
    world.add_group(world.device.allocate(8 * TENSORS))
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("commsched-")]
    assert sorted(names) == ["commsched-copies-back", "commsched-copies-out", "commsched-dispatch", "commsched-gradients"]
    world.core.close()
    core = Core(RecordingTransport(), ALL_AT_ONCE)
    core.add_group(cut(MANIFEST, 8), {"uint8": memoryview(bytearray(32))})
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("commsched-")]
    core.close()
    assert names == ["commsched-dispatch"]


def test_a_group_in_the_hosts_memory_waits_for_an_event_itself() -> None:
    core = Core(transport := RecordingTransport(), ALL_AT_ONCE)
    group = core.add_group(cut(MANIFEST, 8), {"uint8": memoryview(bytearray(32))})
    group.begin_step()
    happened: list[bool] = []

    class Event:
        def synchronize(self) -> None:
            happened.append(not transport.started)

    group.notify_ready(0, Event())
    group.notify_all_ready([1, 2], Event())
    core.close()
    assert happened[0] is True
    assert len(happened) == 2


def test_what_averages_on_a_device_stages_nothing(world: World) -> None:
    transport = RecordingTransport()
    transport.device = "cuda:0"
    core = Core(transport, ALL_AT_ONCE)
    with pytest.raises(
        UnsupportedError, match="RecordingTransport averages on cuda:0: memory of simulated:0 would be averaged in"
    ):
        core.add_group(cut(MANIFEST, 8), {"uint8": world.buffer}, device=world.device)
    core.close()
