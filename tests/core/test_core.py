import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import pytest

from commsched.core.core import Core
from commsched.core.errors import ClosedError, CommschedError, ConfigError, PeerLost, TransportError, UnsupportedError
from commsched.core.group import TensorGroup
from commsched.core.interfaces import Completion, Observer
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.policies import make_policy
from commsched.core.scheduler import SchedulerConfig
from commsched.core.stalls import StepOfGroup, progress_of
from commsched.core.task import CommTask, State
from tests.recording_transport import RecordingTransport

MANIFEST = Manifest(tuple(TensorSpec(f"layer{index}", (10,), "uint8") for index in range(4)))
ONE_BY_ONE = SchedulerConfig(partition_bytes=10, credit_bytes=10)


def in_thread(fn: Callable[[], object]) -> Future[object]:
    """``fn`` in a daemon thread: a test that fails leaves no thread that keeps the process."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="test-engine", daemon=True).start()
    return future


def watch_waits(core: Core) -> threading.Semaphore:
    """Released each time an engine thread comes to wait; whoever then takes the core's lock finds it waiting."""
    waits, wait = threading.Semaphore(0), core._progress.wait

    def announced_wait(timeout: float | None = None) -> bool:
        waits.release()
        return wait(timeout)

    core._progress.wait = announced_wait  # type: ignore[method-assign]
    return waits


class World(Observer):
    """A Core on a transport that the test controls, and its observer and failure callback."""

    def __init__(self) -> None:
        self.transport = RecordingTransport()
        self.failures: SimpleQueue[CommschedError] = SimpleQueue()
        self.tasks: list[CommTask] = []
        self.spans: list[tuple[str, str]] = []
        self.ready: list[tuple[int, int, float]] = []
        self.observed = threading.Event()
        self.core = self.make_core(ONE_BY_ONE)

    def make_core(self, config: SchedulerConfig, warn_after_seconds: float = 1000.0) -> Core:
        if hasattr(self, "core"):
            self.core.close()
        self.core = Core(
            self.transport, config, observer=self, on_failure=self.failures.put, warn_after_seconds=warn_after_seconds
        )
        self.waits = watch_waits(self.core)
        return self.core

    def waiting(self, fn: Callable[[], object]) -> Future[object]:
        """``fn`` in a thread of its own that has come to wait in the core: only a notification can wake it."""
        future = in_thread(fn)
        assert self.waits.acquire(timeout=60), "it did not wait"
        assert not future.done()
        return future

    def add_group(self, partition_bytes: int = 10, manifest: Manifest = MANIFEST) -> TensorGroup:
        buffers = {dtype: memoryview(bytearray(nbytes)) for dtype, nbytes in manifest.buffer_bytes.items()}
        return self.core.add_group(cut(manifest, partition_bytes), buffers)

    def finish(self, group: TensorGroup) -> None:
        """Notify what is missing of the step, and let the network bring all of it."""
        for tensor in range(len(group.manifest.tensors)):
            if tensor not in group.notified:
                group.notify_ready(tensor)
        while group.unfinished:
            started = self.transport.wait_started(0)
            task = next((task for task in started if task.state is not State.DONE), None)
            if task is None:
                self.transport.wait_started(len(started) + 1)
            else:
                self.transport.done(task)

    def on_ready(self, group: int, tensor: int, at: float) -> None:
        self.ready.append((group, tensor, at))

    def on_task(self, task: CommTask) -> None:
        self.tasks.append(task)
        self.observed.set()

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        assert start <= stop
        self.spans.append((track, name))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    in_thread(world.core.close).result(60)  # no time limit of pytest holds after a test has failed


def order(tasks: list[CommTask]) -> list[int]:
    return [task.partition.index for task in tasks]


# --- order and credit ---


def test_front_layers_overtake_what_waits_for_credit(world: World) -> None:
    group = world.add_group()
    group.begin_step()
    group.notify_ready(3)
    world.transport.wait_started(1)
    for tensor in (2, 1, 0):
        group.notify_ready(tensor)
    for count in range(1, 4):
        world.transport.sent(world.transport.wait_started(count)[-1])
    assert order(world.transport.wait_started(4)) == [3, 0, 1, 2]


def test_fifo_starts_in_order_of_readiness(world: World) -> None:
    world.make_core(SchedulerConfig(10, 10, "fifo"))
    group = world.add_group()
    group.begin_step()
    for tensor in (3, 2, 0, 1):
        group.notify_ready(tensor)
    for count in range(1, 4):
        world.transport.sent(world.transport.wait_started(count)[-1])
    assert order(world.transport.wait_started(4)) == [3, 2, 0, 1]


def test_nothing_starts_between_a_failure_and_the_verdict(world: World) -> None:
    """Who waits goes on waiting: the failure may be the consequence of another, which this rank is about to be told."""
    world.make_core(SchedulerConfig(10, 1000))
    tried, all_ready = list[CommTask](), threading.Event()

    def start(task: CommTask, completion: Completion) -> None:
        tried.append(task)
        assert all_ready.wait(60)
        raise PeerLost("rank 1 is gone")

    world.transport.start = start  # type: ignore[method-assign]
    group = world.add_group()
    group.begin_step()
    for tensor in range(4):
        group.notify_ready(tensor)
    all_ready.set()
    assert str(world.failures.get(timeout=60)) == "rank 1 is gone"
    with world.core._lock:
        assert world.core._next_work() == []
    assert len(tried) == 1


def test_credit_comes_back_when_bytes_have_left_not_when_the_average_is_there(world: World) -> None:
    group = world.add_group()
    group.begin_step()
    for tensor in range(4):
        group.notify_ready(tensor)
    for count in range(1, 5):
        world.transport.sent(world.transport.wait_started(count)[-1])
    assert [task.state for task in world.transport.started] == [State.SENT] * 4
    assert not any(proxy.is_open for proxy in group.proxies)


def test_credit_that_came_back_while_nothing_was_ready_starts_the_next_task_at_once(world: World) -> None:
    world.make_core(SchedulerConfig(10, 30))
    group = world.add_group()
    group.begin_step()
    for tensor in (3, 2, 1):
        group.notify_ready(tensor)
    world.transport.sent(world.transport.wait_started(3)[0])
    group.notify_ready(0)
    assert order(world.transport.wait_started(4))[-1] == 0


def test_nothing_starts_above_the_credit(world: World) -> None:
    """A task that is wrongly admitted would be started before the group's only other task, and out of order."""
    world.make_core(SchedulerConfig(10, 20))
    group = world.add_group()
    group.begin_step()
    for tensor in range(4):
        group.notify_ready(tensor)
    assert order(world.transport.wait_started(2)) == [0, 1]
    world.transport.done(world.transport.started[1])  # done without sent gives the credit back as well
    assert order(world.transport.wait_started(3)) == [0, 1, 2]
    assert [task.state for task in group.tasks] == [State.STARTED, State.DONE, State.STARTED, State.READY]


def test_a_rank_that_left_is_spared_once_all_averages_are_here(world: World) -> None:
    group = world.add_group()
    group.begin_step()
    group.notify_ready(0)
    released = threading.Event()
    world.core.part(1, released.set)
    world.core.check()
    assert not released.wait(0.05)
    world.transport.done(world.transport.wait_started(1)[0])
    assert released.wait(60)


def test_a_rank_that_left_is_spared_by_the_last_average_though_its_bytes_have_long_left(world: World) -> None:
    rests, wakes = threading.Semaphore(0), world.core._wakes

    class Watched:
        put = wakes.put

        def get(self) -> None:
            rests.release()
            wakes.get()

    world.core._wakes = Watched()  # type: ignore[assignment]
    group = world.add_group()
    group.begin_step()
    group.notify_ready(0)
    (task,) = world.transport.wait_started(1)
    released = threading.Event()
    world.core.part(1, released.set)
    world.transport.sent(task)
    for _ in iter(lambda: rests.acquire(timeout=60), False):
        with world.core._lock:
            if world.core._is_idle:
                break  # the dispatcher has done all that it was told of
    assert not released.is_set()
    world.transport.done(task)
    assert released.wait(60)


def test_a_transport_that_cannot_release_a_group_ends_the_job_and_not_the_dispatcher(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would start any further task, and all would wait."""

    def release(group: int) -> None:
        raise KeyError(group)

    monkeypatch.setattr(world.transport, "release", release)
    group = world.add_group()
    group.begin_step()
    group.notify_ready(0)
    (task,) = world.transport.wait_started(1)
    group.release()
    world.transport.sent(task)
    world.transport.done(task)
    error = world.failures.get(timeout=60)
    assert str(error) == "rank 0: the dispatcher failed: KeyError: 0"
    assert isinstance(error, TransportError)
    assert world.core._dispatcher.is_alive()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (SchedulerConfig(partition_bytes=0), "partition_bytes is 0; it must be from 1 to 268435456"),
        (SchedulerConfig(partition_bytes=2**28 + 1), "partition_bytes is 268435457; it must be from 1 to 268435456"),
        (SchedulerConfig(credit_bytes=-1), "credit_bytes is -1; it must not be negative"),
        (SchedulerConfig(fusion_bytes=-1), "fusion_bytes is -1; it must not be negative"),
        (SchedulerConfig(policy="nope"), "policy 'nope' is unknown; there are: fifo, priority"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_before_ranks_agree_on_it(
    world: World, config: SchedulerConfig, said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        world.core.require_supported(config)
    assert str(raised.value) == said


def test_what_becomes_ready_after_a_rank_has_gone_fails_and_does_not_wait(world: World) -> None:
    group = world.add_group()
    released = threading.Event()
    world.core.part(1, released.set)
    assert released.wait(60)
    group.begin_step()
    group.notify_ready(2)
    error = world.failures.get(timeout=60)
    assert str(error) == "rank 1 left before its first step; the average of tensor 'layer2' of step 0 waits for it"
    assert isinstance(error, PeerLost)
    assert world.transport.started == []


def test_the_loss_of_a_rank_says_what_was_under_way(world: World) -> None:
    """Of the largest group: others tell what ranks did in a step."""
    group = world.add_group()
    group.begin_step()
    world.add_group(manifest=Manifest((TensorSpec("flags", (1,), "uint8"),))).begin_step()
    for tensor in (3, 1):
        group.notify_ready(tensor)
    world.transport.done(world.transport.wait_started(1)[0])
    world.core.fail(PeerLost("rank 1 is gone", rank=1))
    with pytest.raises(PeerLost) as caught:
        world.core.check()
    assert (caught.value.rank, caught.value.step, caught.value.tensor) == (1, 0, "layer0")
    assert caught.value.__notes__ == ["rank 0 was in step 0: the average of 'layer0' and 2 more had not arrived yet"]


def test_a_loss_that_says_itself_what_it_was_about_is_not_changed(world: World) -> None:
    world.add_group().begin_step()
    error = PeerLost("rank 1 left", rank=1, step=7, tensor="head")
    world.core.fail(error)
    assert (error.step, error.tensor) == (7, "head")
    assert not hasattr(error, "__notes__")


def test_a_partition_is_ready_when_all_its_tensors_are(world: World) -> None:
    group = world.add_group(partition_bytes=20)  # layers 0 and 1, 2 and 3
    group.begin_step()
    group.notify_ready(3)
    group.notify_ready(1)
    assert [task.state for task in group.tasks] == [State.PENDING, State.PENDING]
    group.notify_ready(2)
    assert order(world.transport.wait_started(1)) == [1]


def test_a_tensor_of_several_partitions_opens_with_the_last_one(world: World) -> None:
    world.make_core(SchedulerConfig(4, 100))
    group = world.add_group(4, Manifest((TensorSpec("big", (10,), "uint8"),)))
    group.begin_step()
    group.notify_ready(0)
    started = world.transport.wait_started(3)
    waiting = world.waiting(group.proxies[0].wait)
    for task in reversed(started):
        assert not waiting.done()
        assert repr(group.proxies[0]).startswith("<DependencyProxy 'big' waits for ")
        world.transport.done(task)
    waiting.result(60)
    assert repr(group.proxies[0]) == "<DependencyProxy 'big' open>"


def test_the_transport_is_given_the_tensors_own_bytes(world: World) -> None:
    manifest = Manifest((TensorSpec("a", (2,), "float32"), TensorSpec("b", (1,), "float64"), TensorSpec("c", (1,), "float32")))
    buffers = {"float32": memoryview(bytearray(range(12))), "float64": memoryview(bytearray(range(50, 58)))}
    world.make_core(SchedulerConfig(8, 100))
    group = world.core.add_group(cut(manifest, 8), buffers)
    group.begin_step()
    for tensor in range(3):
        group.notify_ready(tensor)
    assert [bytes(task.data) for task in world.transport.wait_started(3)] == [
        bytes(range(8)),
        bytes(range(50, 58)),
        bytes(range(8, 12)),
    ]
    world.transport.started[2].data[:] = b"mean"
    assert bytes(buffers["float32"][8:]) == b"mean"
    assert world.transport.groups == {0: manifest}


def test_a_tensor_without_elements_is_open_at_once(world: World) -> None:
    manifest = Manifest((TensorSpec("empty", (0,), "float32"), TensorSpec("bias", (1,), "float32")))
    group = world.add_group(10, manifest)
    group.begin_step()
    group.proxies[0].wait()
    group.notify_ready(0)
    assert not group.proxies[1].is_open
    world.finish(group)
    assert group.begin_step() == 1


def test_groups_share_the_credit_and_are_numbered(world: World) -> None:
    a, b = world.add_group(), world.add_group()
    assert (a.index, b.index, world.core.group_count) == (0, 1, 2)
    for group in (a, b):
        group.begin_step()
        group.notify_ready(0)
    assert world.transport.wait_started(1)[0].group == 0
    world.transport.sent(world.transport.started[0])
    assert world.transport.wait_started(2)[1].group == 1


# --- steps ---


def test_begin_step_waits_until_the_step_before_is_done(world: World) -> None:
    group = world.add_group()
    assert group.begin_step() == 0
    for tensor in range(4):
        group.notify_ready(tensor)
    next_step = world.waiting(group.begin_step)
    for count in range(1, 5):
        assert not next_step.done()
        world.transport.done(world.transport.wait_started(count)[-1])
    assert next_step.result(60) == 1
    assert [task.state for task in group.tasks] == [State.PENDING] * 4
    assert not any(proxy.is_open for proxy in group.proxies)


def test_proxies_are_open_before_the_first_step(world: World) -> None:
    group = world.add_group()
    for proxy in group.proxies:
        proxy.wait()
    assert group.step == -1


@pytest.mark.parametrize("tensor", [-1, 4])
def test_notifying_what_is_no_tensor_is_refused(world: World, tensor: int) -> None:
    group = world.add_group()
    group.begin_step()
    with pytest.raises(ValueError, match=rf"^there is no tensor {tensor} among the 4 of group 0$"):
        group.notify_ready(tensor)
    world.finish(group)
    assert sorted(order(world.transport.started)) == [0, 1, 2, 3]


def test_notifying_twice_names_the_tensor_and_starts_nothing_twice(world: World) -> None:
    group = world.add_group()
    with pytest.raises(ValueError, match=r"^tensor 'layer2' was notified twice in step -1, or before any step$"):
        group.notify_ready(2)
    group.begin_step()
    group.notify_ready(2)
    with pytest.raises(ValueError, match=r"^tensor 'layer2' was notified twice in step 0, or before any step$"):
        group.notify_ready(2)
    world.finish(group)
    assert sorted(order(world.transport.started)) == [0, 1, 2, 3]
    assert group.begin_step() == 1
    group.notify_ready(2)


def test_tensors_that_are_notified_together_are_queued_before_the_first_starts(world: World) -> None:
    """One by one, the last layer's might start before the first layer's is known to be ready."""
    group = world.add_group()
    group.begin_step()
    group.notify_all_ready([3, 1, 2, 0])
    for count in range(1, 4):
        world.transport.sent(world.transport.wait_started(count)[-1])
    assert order(world.transport.wait_started(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(4, r"^there is no tensor 4 among the 4 of group 0$"), (3, r"^tensor 'layer3' was notified twice in step 0, or before")],
)
def test_tensors_before_a_wrong_one_count_as_ready(world: World, wrong: int, message: str) -> None:
    group = world.add_group()
    group.begin_step()
    with pytest.raises(ValueError, match=message):
        group.notify_all_ready([3, wrong, 0])
    assert order(world.transport.wait_started(1)) == [3]
    world.finish(group)
    assert sorted(order(world.transport.started)) == [0, 1, 2, 3]


def test_a_rank_is_not_late_with_gradients_that_are_on_hand(world: World) -> None:
    group = world.add_group(partition_bytes=40)
    group.begin_step()
    group.notify_ready(2)
    group.on_hand.add(0)
    assert world.core._progress_of(StepOfGroup(group.index, 0, 0)) == progress_of(["layer1", "layer3"], [])
    group.notify_all_ready([0, 1, 3])
    world.finish(group)
    group.begin_step()
    everything = [f"layer{index}" for index in range(4)]
    assert world.core._progress_of(StepOfGroup(group.index, 1, 0)) == progress_of(everything, [])


def test_drain_waits_for_what_became_ready_and_for_nothing_else(world: World) -> None:
    group = world.add_group()
    world.core.drain()
    group.begin_step()
    world.core.drain()
    group.notify_ready(3)
    drained = world.waiting(world.core.drain)
    task = world.transport.wait_started(1)[0]
    world.transport.sent(task)
    assert not drained.done()
    world.transport.done(task)
    drained.result(60)


def test_drain_ends_with_the_last_task_though_no_average_is_complete(world: World) -> None:
    """The step was broken off, and a tensor has bytes in a partition that never becomes ready."""
    group = world.add_group(20, Manifest((TensorSpec("w", (30,), "uint8"), TensorSpec("b", (2,), "uint8"))))
    assert [len(partition.tensors) for partition in group.plan.partitions] == [1, 2]
    group.begin_step()
    group.notify_ready(0)
    drained = world.waiting(world.core.drain)
    world.transport.done(world.transport.wait_started(1)[0])
    drained.result(60)
    assert not group.proxies[0].is_open


def test_the_observer_sees_each_gradient_each_task_and_each_wait(world: World) -> None:
    group = world.add_group()
    group.begin_step()
    waiting = world.waiting(group.proxies[3].wait)
    group.notify_ready(3)
    task = world.transport.wait_started(1)[0]
    world.transport.sent(task)
    world.transport.done(task)
    waiting.result(60)
    assert world.observed.wait(60)
    assert world.tasks == [task]
    assert world.ready == [(0, 3, task.ready_at)]
    assert 0 < task.ready_at <= task.started_at <= task.sent_at <= task.done_at
    group.proxies[3].wait()  # is open: no wait, no span
    assert world.spans == [("wait", "layer3")]


def test_a_task_that_is_done_without_sent_was_sent_when_it_was_done(world: World) -> None:
    group = world.add_group()
    group.begin_step()
    group.notify_ready(0)
    task = world.transport.wait_started(1)[0]
    world.transport.done(task)
    assert task.started_at <= task.sent_at <= task.done_at
    with pytest.raises(KeyError):
        world.transport.done(task)


# --- changes of configuration ---


def agree(core: Core, config: SchedulerConfig) -> dict[int, int]:
    """What the control channel does, for a world of one rank."""
    steps = core.hold_steps()
    core.switch_at(config, steps)
    return steps


def run_step(world: World, group: TensorGroup) -> int:
    """One whole step; how many partitions it had."""
    group.begin_step()
    world.finish(group)
    return len(group.tasks)


def test_a_change_takes_effect_at_exactly_the_agreed_step(world: World) -> None:
    group = world.add_group()
    assert run_step(world, group) == 4
    assert world.core.hold_steps() == {0: 2}
    world.core.switch_at(SchedulerConfig(20, 20), {0: 3})  # another rank was a step ahead
    assert [run_step(world, group) for _ in range(4)] == [4, 4, 2, 2]
    assert world.core.config == SchedulerConfig(20, 20)


def test_credit_and_policy_change_with_the_partition(world: World) -> None:
    group = world.add_group()
    agree(world.core, SchedulerConfig(10, 20, "fifo"))
    assert run_step(world, group) == 4
    assert world.core.config == ONE_BY_ONE
    group.begin_step()
    for tensor in (3, 2, 1, 0):
        group.notify_ready(tensor)
    assert order(world.transport.wait_started(6)[4:]) == [3, 2]  # fifo, and two at a time


def test_a_held_step_does_not_begin_before_the_change_is_agreed(world: World) -> None:
    group = world.add_group()
    promised = world.core.hold_steps()
    assert promised == {0: 1}
    run_step(world, group)  # step 0 was not promised away
    step_1 = world.waiting(group.begin_step)
    world.core.switch_at(SchedulerConfig(20, 20), promised)
    assert step_1.result(60) == 1
    assert len(group.tasks) == 2


def test_a_second_change_does_not_swallow_one_that_this_rank_has_not_reached(world: World) -> None:
    """A rank that lags a step behind is told of the next change before it has applied the last one."""
    group = world.add_group()
    world.core.hold_steps()
    world.core.switch_at(SchedulerConfig(20, 20), {0: 2})
    world.core.hold_steps()
    world.core.switch_at(SchedulerConfig(40, 40), {0: 4})
    assert [run_step(world, group) for _ in range(6)] == [4, 4, 2, 2, 1, 1]


def test_two_changes_at_one_step_leave_the_later(world: World) -> None:
    group = world.add_group()
    agree(world.core, SchedulerConfig(20, 20))
    agree(world.core, SchedulerConfig(40, 40))
    assert [run_step(world, group) for _ in range(3)] == [4, 1, 1]
    assert world.core.config == SchedulerConfig(40, 40)


def test_a_group_that_lags_behind_does_not_bring_back_the_older_credit(world: World) -> None:
    fast, slow = world.add_group(), world.add_group()
    assert agree(world.core, SchedulerConfig(20, 20)) == {0: 1, 1: 1}
    assert run_step(world, slow) == 4
    assert [run_step(world, fast) for _ in range(2)] == [4, 2]
    assert agree(world.core, SchedulerConfig(40, 40)) == {0: 3, 1: 2}
    assert [run_step(world, fast) for _ in range(2)] == [2, 1]
    assert run_step(world, slow) == 2
    assert world.core.config == SchedulerConfig(40, 40)
    assert run_step(world, slow) == 1


def test_a_group_that_is_added_after_a_change_has_its_credit_while_an_older_group_is_idle(world: World) -> None:
    world.add_group()  # begins no step
    agree(world.core, SchedulerConfig(10, 20))
    assert world.core.config == ONE_BY_ONE
    world.core.reserve_group()
    group = world.add_group()
    assert world.core.config == SchedulerConfig(10, 20)
    group.begin_step()
    for tensor in (3, 2, 1, 0):
        group.notify_ready(tensor)
    assert len(world.transport.wait_started(2)) == 2  # at a time


def test_a_change_before_the_first_group_counts_for_the_groups_to_come(world: World) -> None:
    agree(world.core, SchedulerConfig(20, 20))
    assert world.core.config == SchedulerConfig(20, 20)


def test_a_released_group_promises_nothing(world: World) -> None:
    released, group = world.add_group(), world.add_group()
    run_step(world, released)
    released.release()
    assert world.core.hold_steps() == {group.index: 1}


def test_a_change_that_waits_for_a_group_ends_with_the_group(world: World) -> None:
    """Nothing is kept for a group that has no further step."""
    released, waits = world.add_group(), world.add_group()
    steps = world.core.hold_steps()
    released.release()
    world.core.switch_at(SchedulerConfig(20, 20), steps)
    assert [change.steps for change in world.core._changes.waiting] == [{waits.index: 1}]
    assert world.core.config == ONE_BY_ONE
    assert world.core.without_released({0: 3, 1: 4, 2: 5}) == {1: 4, 2: 5}
    waits.release()
    assert world.core._changes.waiting == []
    assert world.core.config == SchedulerConfig(20, 20)  # for the groups to come


def test_a_change_may_be_agreed_on_before_this_rank_has_added_the_group(world: World) -> None:
    world.core.hold_steps()
    world.core.switch_at(SchedulerConfig(20, 20), {0: 1})  # another rank has added it
    group = world.add_group()
    assert [run_step(world, group) for _ in range(3)] == [4, 2, 2]
    assert world.core.config == SchedulerConfig(20, 20)


def test_a_group_that_is_added_while_steps_are_held_begins_one_step(world: World) -> None:
    """For ranks that have not promised it, its step 1 may be the first with the new configuration."""
    assert world.core.hold_steps() == {}
    group = world.add_group()
    assert run_step(world, group) == 4
    step_1 = world.waiting(group.begin_step)
    world.core.switch_at(SchedulerConfig(20, 20), {0: 1})
    assert step_1.result(60) == 1
    assert len(group.tasks) == 2


def test_a_change_includes_the_group_whose_registration_is_under_way(world: World) -> None:
    assert world.core.reserve_group() == ONE_BY_ONE
    assert agree(world.core, SchedulerConfig(20, 20)) == {0: 1}
    group = world.add_group()
    assert [run_step(world, group) for _ in range(3)] == [4, 2, 2]


def test_no_change_waits_for_a_registration_that_was_refused(world: World) -> None:
    world.core.reserve_group()
    assert agree(world.core, SchedulerConfig(20, 20)) == {0: 1}
    assert world.core.config == ONE_BY_ONE
    world.core.cancel_reservation()
    assert world.core.config == SchedulerConfig(20, 20)
    assert world.core.hold_steps() == {}


def test_a_registration_waits_until_the_change_that_does_not_include_it_is_agreed_on(world: World) -> None:
    other = world.add_group()
    steps = world.core.hold_steps()
    reserving = world.waiting(world.core.reserve_group)
    world.core.switch_at(SchedulerConfig(20, 20), steps)
    assert reserving.result(60) == SchedulerConfig(20, 20)  # though no step has begun with it
    assert world.core.config == ONE_BY_ONE
    assert world.core.hold_steps() == {other.index: 1, other.index + 1: 1}


@pytest.mark.parametrize("key", [-1, 1 << 32, (1, 2), 1.0])
def test_a_policy_whose_key_does_not_fit_the_wire_ends_the_job_by_name(
    world: World, monkeypatch: pytest.MonkeyPatch, key: object
) -> None:
    monkeypatch.setattr(type(make_policy("priority")), "key", lambda self, task: key)
    group = world.add_group()
    group.begin_step()
    group.notify_ready(0)
    said = re.escape(f"policy='priority' has the key {key!r} for tensor ")
    with pytest.raises(ConfigError, match=rf"^{said}.*; it must be an int from 0 to 2\^32 - 1$"):
        raise world.failures.get(timeout=60)


def test_no_step_of_a_released_group_begins(world: World) -> None:
    group = world.add_group()
    run_step(world, group)
    group.release()
    with pytest.raises(ValueError, match="group 0 was released: no further step of it may begin"):
        group.begin_step()


def test_a_released_group_is_released_by_the_transport_once_nothing_of_it_is_outstanding(world: World) -> None:
    done, under_way, last = world.add_group(), world.add_group(), world.add_group()
    run_step(world, done)
    under_way.begin_step()
    under_way.notify_ready(0)
    (task,) = world.transport.wait_started(5)[4:]
    for group in (done, under_way):
        group.release()
    assert world.transport.released == [done.index]
    world.transport.done(task)
    last.begin_step()
    last.notify_ready(0)
    world.transport.wait_started(6)  # by the thread that has released it before
    assert world.transport.released == [done.index, under_way.index]


def test_what_is_missing_of_a_step(world: World) -> None:
    group = world.add_group()
    assert group.missing() == []
    group.begin_step()
    group.notify_ready(2)
    assert group.missing() == [0, 1, 3]


def test_an_idle_dispatcher_keeps_no_buffer(world: World) -> None:
    class Memory(bytearray):
        pass

    memory = Memory(40)
    group = world.core.add_group(cut(MANIFEST, 10, 0), {"uint8": memoryview(memory)})
    gone = threading.Event()
    weakref.finalize(memory, gone.set)
    run_step(world, group)
    del memory
    for tasks in (world.transport.started, world.transport._completions, world.tasks):
        tasks.clear()
    group.release()
    assert gone.wait(60)


# --- failure and end ---


def test_a_failure_opens_every_wait_and_is_raised_at_every_later_call(world: World) -> None:
    group = world.add_group()
    other = world.add_group()
    group.begin_step()
    other.begin_step()
    for tensor in range(4):
        other.notify_ready(tensor)
    waits = [world.waiting(call) for call in (group.proxies[0].wait, world.core.drain, other.begin_step)]
    lost = PeerLost("rank 1 is gone: its connection broke")
    world.core.fail(lost)
    world.core.fail(PeerLost("a later one"))
    for wait in waits:
        assert wait.exception(60) is lost
    for call in (
        group.begin_step,
        lambda: group.notify_ready(1),
        group.proxies[1].wait,
        world.core.drain,
        world.core.check,
        world.add_group,
    ):
        with pytest.raises(PeerLost, match=r"^rank 1 is gone: its connection broke\b"):
            call()
    assert world.failures.empty()  # it did not arise here


def test_nothing_starts_after_a_failure(world: World) -> None:
    group = world.add_group()
    group.begin_step()
    for tensor in range(4):
        group.notify_ready(tensor)
    task = world.transport.wait_started(1)[0]
    world.core.fail(PeerLost("rank 1 is gone"))
    world.transport.sent(task)  # a transport may still report; it is too late for the next start
    world.core.close()  # ends the dispatcher: whatever it would have started, it has
    assert world.transport.started == [task]


class RaisingTransport(RecordingTransport):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def start(self, task: CommTask, completion: Completion) -> None:
        raise self.error


def test_a_failure_here_is_raised_as_what_the_job_names_as_its_cause(world: World) -> None:
    """A peer that is gone may have ended because of what this rank is about to be told."""
    seen, cause = PeerLost("rank 2 is gone: Broken pipe"), PeerLost("rank 1 is gone")
    world.transport = RaisingTransport(seen)
    group = group_of_raising(world)
    waits = [world.waiting(group.proxies[0].wait)]
    group.notify_ready(0)
    assert world.failures.get(timeout=60) is seen
    group.notify_ready(1)  # still raises nothing
    waits += [world.waiting(call) for call in (world.core.drain, group.begin_step)]
    world.core.fail(cause)
    for wait in waits:
        assert wait.exception(60) is cause
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        group.notify_ready(2)
    world.core.close()
    assert world.failures.empty()  # told once, and nothing was started after it


def test_a_group_that_a_lost_peer_cannot_be_told_of_names_the_cause_too(world: World) -> None:
    class NobodyThere(RecordingTransport):
        def add_group(self, group: int, manifest: Manifest) -> None:
            raise PeerLost("rank 2 is gone: Broken pipe")

    world.transport = NobodyThere()
    world.make_core(ONE_BY_ONE)
    adding = [world.waiting(world.add_group) for _ in range(2)]
    assert str(world.failures.get(timeout=60)) == "rank 2 is gone: Broken pipe"
    world.core.fail(PeerLost("rank 1 is gone"))
    assert [str(each.exception(60)) for each in adding] == ["rank 1 is gone"] * 2
    assert world.failures.empty()  # told once


def test_an_error_of_ours_from_the_transport_is_the_failure_if_nobody_knows_better() -> None:
    lost = PeerLost("rank 1 is gone")
    core = Core(RaisingTransport(lost), ONE_BY_ONE)
    group = core.add_group(cut(MANIFEST, 10), {"uint8": memoryview(bytearray(40))})
    group.begin_step()
    group.notify_ready(0)
    assert in_thread(core.drain).exception(60) is lost
    core.close()


def test_any_other_error_of_the_transport_is_a_failure_that_names_it(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.transport = RaisingTransport(OSError("no route"))
    group_of_raising(world).notify_ready(0)
    said = "rank 0: the transport raised OSError: no route at tensor 'layer0' (partition 0 of step 0, all_reduce)"
    error = world.failures.get(timeout=60)
    assert type(error) is TransportError
    assert str(error) == said
    assert (error.rank, error.step) == (0, 0)
    assert "the transport raised" in caplog.text


def group_of_raising(world: World) -> TensorGroup:
    world.make_core(ONE_BY_ONE)
    group = world.add_group()
    group.begin_step()
    return group


def test_close_ends_the_dispatcher_and_every_wait(world: World) -> None:
    before = {thread for thread in threading.enumerate() if thread.name == "commsched-dispatch"}
    core = Core(RecordingTransport(), ONE_BY_ONE, warn_after_seconds=1000.0)
    (dispatcher,) = {thread for thread in threading.enumerate() if thread.name == "commsched-dispatch"} - before
    assert dispatcher.daemon
    group = core.add_group(cut(MANIFEST, 10), {"uint8": memoryview(bytearray(40))})
    group.begin_step()
    waits = watch_waits(core)
    waiting = in_thread(group.proxies[0].wait)
    assert waits.acquire(timeout=60)
    core.close()
    assert not dispatcher.is_alive()
    assert str(waiting.exception(60)) == "this session is closed"
    for call in (group.begin_step, lambda: group.notify_ready(0), core.drain, core.check):
        with pytest.raises(ClosedError, match=r"^this session is closed$"):
            call()
    core.close()


def test_who_has_interrupted_a_thread_within_the_core_does_not_wait_there(world: World) -> None:
    """A signal handler, or a finalizer: it would wait for the lock of its own thread, or for what that is about to do."""
    group = world.add_group()
    group.begin_step()

    def interrupted(wait: Callable[[], object]) -> None:
        with world.core._lock, pytest.raises(UnsupportedError, match="has interrupted its thread within commsched"):
            wait()

    for wait in (group.proxies[0].wait, world.core.drain, group.begin_step, world.core.reserve_group, world.core.close):
        in_thread(partial(interrupted, wait)).result(60)


def test_a_failure_after_close_is_nobodys_business(world: World) -> None:
    world.core.close()
    world.core.fail(PeerLost("rank 1 is gone"))
    assert world.failures.empty()
    with pytest.raises(ClosedError):
        world.core.check()


def test_a_long_wait_says_what_it_waits_for(world: World) -> None:
    """The log is written without the lock: a handler may call the core."""
    seen: list[tuple[str, bool]] = []
    said = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lock_is_free = not world.core._lock._is_owned()
            seen.append((record.getMessage(), lock_is_free))
            said.set()

    handler = Handler()
    logger = logging.getLogger("commsched")
    logger.addHandler(handler)
    try:
        world.make_core(ONE_BY_ONE, warn_after_seconds=0.01)
        group = world.add_group()
        group.begin_step()
        waiting = in_thread(group.proxies[2].wait)
        assert said.wait(60)
        line, lock_was_free = seen[0]
        assert re.fullmatch(r"rank 0 has waited \d s for the average of 'layer2' of step 0", line)
        assert lock_was_free
        world.finish(group)
        waiting.result(60)
    finally:
        logger.removeHandler(handler)
