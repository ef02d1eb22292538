import threading

import pytest

from commsched.core.errors import CommschedError
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import Partition
from commsched.core.task import CommTask
from commsched.testing.check_plugin import Delayed
from tests.recording_transport import RecordingTransport


class Told:
    """A Completion that remembers."""

    def __init__(self) -> None:
        self.sent: list[CommTask] = []
        self.done: list[CommTask] = []
        self.is_done = threading.Event()

    def on_sent(self, task: CommTask) -> None:
        self.sent.append(task)

    def on_done(self, task: CommTask) -> None:
        self.done.append(task)
        self.is_done.set()


def make_task(data: bytearray, index: int = 0) -> CommTask:
    return CommTask(0, 0, Partition(index, "float32", 0, len(data), (0,)), memoryview(data))


def test_a_recording_transport_does_what_the_test_says() -> None:
    transport, told, task = RecordingTransport(rank=1, world_size=3), Told(), make_task(bytearray(4))
    manifest = Manifest((TensorSpec("w", (1,), "float32"),))
    transport.add_group(0, manifest)
    transport.start(task, told)
    transport.leave(2)
    transport.release(0)
    assert transport.released == [0]
    assert transport.wait_started(1) == [task]
    assert (transport.rank, transport.world_size, transport.groups, transport.left) == (1, 3, {0: manifest}, [2])
    assert told.sent == told.done == []
    transport.sent(task)
    transport.done(task)
    assert told.sent == told.done == [task]
    transport.close()
    assert transport.closed


def test_a_start_that_does_not_come_is_named() -> None:
    transport = RecordingTransport()
    transport.start(make_task(bytearray(4)), Told())
    with pytest.raises(TimeoutError, match=r"^1 of 2 tasks were started: "):
        transport.wait_started(2, timeout_seconds=0.01)


def test_a_delayed_task_is_poisoned_until_its_reply() -> None:
    inner, told, data = RecordingTransport(), Told(), bytearray(b"gradient")
    delayed, task = Delayed(inner, seed=1, most_seconds=0.001), make_task(data)
    try:
        delayed.start(task, told)
        assert data == b"\xff" * 8
        (copy,) = inner.wait_started(1)
        assert bytes(copy.data) == b"gradient"
        assert (copy.group, copy.step, copy.partition) == (task.group, task.step, task.partition)
        inner.sent(copy)
        assert told.sent == [task]
        copy.data[:] = b"averaged"
        assert data == b"\xff" * 8
        inner.done(copy)
        assert told.is_done.wait(60)
        assert told.done == [task]
        assert data == b"averaged"
    finally:
        delayed.close()


def test_a_delayed_transport_passes_on_the_rest_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    inner = RecordingTransport(rank=1, world_size=4)
    delayed = Delayed(inner, seed=1, most_seconds=1000.0)
    delayed.add_group(0, Manifest(()))
    delayed.leave(3)
    delayed.release(0)
    assert inner.released == [0]
    assert (delayed.rank, delayed.world_size, inner.groups, inner.left) == (1, 4, {0: Manifest(())}, [3])
    delayed.close()
    delayed.close()
    assert inner.closed
    assert set(threading.enumerate()) <= before  # what an earlier test has begun may end meanwhile


def test_close_does_not_wait_for_delays() -> None:
    """Both a start that pauses and a reply that is to come in an hour end at once."""
    inner, told = RecordingTransport(), Told()
    delayed = Delayed(inner, seed=1, most_seconds=3600.0)
    starting = threading.Thread(target=delayed.start, args=(make_task(bytearray(4)), told), name="test-start", daemon=True)
    starting.start()
    delayed.close()
    starting.join(60)
    assert not starting.is_alive()
    inner.done(inner.started[0])
    assert told.done == []


class RefusingTransport(RecordingTransport):
    def start(self, task: CommTask, completion: object) -> None:
        raise CommschedError("refused")


def test_what_the_transport_raises_is_raised() -> None:
    delayed = Delayed(RefusingTransport(), seed=1, most_seconds=0.001)
    try:
        with pytest.raises(CommschedError, match=r"^refused$"):
            delayed.start(make_task(bytearray(4)), Told())
    finally:
        delayed.close()
