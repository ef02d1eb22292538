"""What an operation of gloo may take, and what it fails by; the thread that waits for exchanges."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch.distributed")

from commsched.core.late_thread import LateThread
from commsched.transports.backends.gloo.channel import _MIN_BYTES_PER_SECOND, GlooChannel, PendingWork, Waiter


@pytest.fixture
def channel() -> GlooChannel:
    """Without a process group."""
    made = object.__new__(GlooChannel)
    made._lock, made._bytes_under_way, made._patience_seconds = threading.Lock(), 0, 100.0
    return made


def test_an_operation_has_the_time_that_its_bytes_take_behind_those_under_way(channel: GlooChannel) -> None:
    second = int(_MIN_BYTES_PER_SECOND)
    done: list[BaseException | None] = []
    assert channel._begin(10 * second) == timedelta(seconds=110)
    assert channel._begin(20 * second) == timedelta(seconds=130)
    channel._end(10 * second, done.append, None)
    channel._end(20 * second, done.append, None)
    assert channel._begin(10 * second) == timedelta(seconds=110)
    assert done == [None, None]


def test_an_all_reduce_that_fails_is_not_taken_for_one_that_is_done(channel: GlooChannel) -> None:
    class Failed:
        def value(self) -> Any:
            raise RuntimeError("Connection closed by peer")

    done: list[BaseException | None] = []
    channel._begin(8)
    channel._all_reduced(8, done.append, Failed())
    assert [str(error) for error in done] == ["Connection closed by peer"]
    assert channel._bytes_under_way == 0


def test_a_channel_is_closed_when_its_group_is_gone(channel: GlooChannel) -> None:
    """The end of the process must not meet gloo's threads."""
    over = threading.Event()

    class Waiter:
        def close(self) -> None:
            assert over.wait(60)

    channel.rank, channel._waiters, channel._group = 0, [Waiter()], object()  # type: ignore[list-item]
    channel._closer = LateThread("commsched-gloo-close-0")
    threading.Timer(0.1, over.set).start()
    channel.close(graceful=True)
    assert channel._group is None


PATIENCE = timedelta(seconds=100)


class Message:
    def __init__(self, fails: bool, waits: list[timedelta]) -> None:
        self._fails = fails
        self._waits = waits

    def wait(self, timeout: timedelta) -> None:
        self._waits.append(timeout)
        if self._fails:
            raise RuntimeError("Connection closed by peer")


def test_after_a_failure_nothing_is_waited_for() -> None:
    waits: list[timedelta] = []
    ends: list[str] = []
    waiter = Waiter("a waiter")
    for fails in ((False, False), (False, True, False), (True,)):
        messages: list[Any] = [Message(each, waits) for each in fails]
        waiter.put(PendingWork(messages, [], PATIENCE, lambda error: ends.append(str(error))))
    waiter.close()
    assert waits == [*[PATIENCE] * 4, timedelta(milliseconds=1)]
    assert ends == ["None", "Connection closed by peer", "Connection closed by peer"]
