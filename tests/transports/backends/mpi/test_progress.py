"""The thread that calls MPI, over an MPI whose requests complete when the test says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from commsched.transports.backends.mpi.communicators import MpiChannel
from commsched.transports.backends.mpi.progress import _ABANDONED, Progress
from commsched.transports.collective.channel import CannotBegin

_SECONDS = 60.0


class FakeMpi:
    """``complete`` makes a request complete, ``fail`` everything; ``testing`` is set whenever MPI is called."""

    def __init__(self) -> None:
        self.complete: set[str] = set()
        self.fail: Exception | None = None
        self.testing = threading.Event()
        self.threads: set[str] = set()
        self.Request = SimpleNamespace(Testsome=self._testsome)

    def _testsome(self, requests: list[str]) -> list[int]:
        self.testing.set()
        self.threads.add(threading.current_thread().name)
        if self.fail is not None:
            raise self.fail
        return [index for index, request in enumerate(requests) if request in self.complete]


class Ends:
    """What the operations of a test ended with, in order."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, BaseException | None]] = []
        self._changed = threading.Condition()

    def of(self, name: str):  # type: ignore[no-untyped-def]
        def done(error: BaseException | None) -> None:
            with self._changed:
                self.ends.append((name, error))
                self._changed.notify_all()

        return done

    def wait(self, count: int) -> list[tuple[str, BaseException | None]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ends) >= count, _SECONDS), self.ends
            return list(self.ends)


@pytest.fixture
def mpi() -> FakeMpi:
    return FakeMpi()


@pytest.fixture
def progress(mpi: FakeMpi) -> Iterator[Progress]:
    opened = Progress(mpi)
    yield opened
    opened.stop()


def test_an_operation_ends_with_its_last_request(mpi: FakeMpi, progress: Progress) -> None:
    ends = Ends()
    mpi.complete = {"a1"}
    progress.submit(lambda: ["a1", "a2"], ends.of("a"))
    progress.submit(lambda: ["b"], ends.of("b"))
    assert mpi.testing.wait(_SECONDS)
    mpi.complete.add("b")
    assert ends.wait(1) == [("b", None)]
    mpi.complete.add("a2")
    assert ends.wait(2) == [("b", None), ("a", None)]
    assert mpi.threads == {"commsched-mpi"}


def test_an_operation_without_requests_ends_at_once(mpi: FakeMpi, progress: Progress) -> None:
    ends = Ends()
    progress.submit(list, ends.of("nothing"))
    assert ends.wait(1) == [("nothing", None)]


def test_operations_begin_in_order_and_may_begin_others(mpi: FakeMpi, progress: Progress) -> None:
    ends = Ends()
    begun: list[int] = []
    mpi.complete = {"x"}

    def begin(number: int) -> list[str]:
        begun.append(number)
        return ["x"]

    def then(error: BaseException | None) -> None:
        progress.submit(lambda: begin(4), ends.of("last"))

    for number in range(3):
        progress.submit(lambda number=number: begin(number), lambda error: None)  # type: ignore[misc]
    progress.submit(lambda: begin(3), then)
    ends.wait(1)
    assert begun == [0, 1, 2, 3, 4]


def test_nothing_is_called_while_nothing_is_pending(mpi: FakeMpi, progress: Progress) -> None:
    ends = Ends()
    mpi.complete = {"x"}
    progress.submit(lambda: ["x"], ends.of("x"))
    ends.wait(1)
    progress.submit(list, ends.of("still here"))  # the thread has come round
    ends.wait(2)
    mpi.testing.clear()
    progress.submit(list, ends.of("and again"))
    ends.wait(3)
    assert not mpi.testing.is_set()


def test_a_failure_of_mpi_ends_everything_that_is_pending_or_new(mpi: FakeMpi, progress: Progress) -> None:
    ends = Ends()
    progress.submit(lambda: ["a1", "a2"], ends.of("a"))
    progress.submit(lambda: ["b"], ends.of("b"))
    assert mpi.testing.wait(_SECONDS)
    mpi.fail = RuntimeError("the link is down")
    assert ends.wait(2) == [("a", mpi.fail), ("b", mpi.fail)]
    progress.submit(lambda: ["c"], ends.of("c"))
    assert ends.wait(3)[2] == ("c", mpi.fail)


def test_an_operation_that_cannot_begin_ends_with_why(mpi: FakeMpi, progress: Progress) -> None:
    ends = Ends()

    def begin() -> list[str]:
        raise ValueError("no such rank")

    progress.submit(lambda: ["a"], ends.of("a"))
    progress.submit(begin, ends.of("b"))
    told = dict(ends.wait(2))
    assert told.keys() == {"a", "b"}
    assert {(type(error), str(error)) for error in told.values()} == {(CannotBegin, "ValueError: no such rank")}


def test_requests_of_an_exchange_that_began_in_part_are_kept(mpi: FakeMpi, progress: Progress) -> None:
    """MPI may still write to their memory."""

    class Half:
        rank, size = 0, 2

        def Set_errhandler(self, handler: None) -> None: ...

        def Irecv(self, message: list[object], rank: int, tag: int) -> str:
            return f"receive of tag {tag}"

        def Isend(self, message: list[object], rank: int, tag: int) -> str:
            raise ValueError("no such rank")

    constants = SimpleNamespace(FLOAT=None, DOUBLE=None, BYTE=None, ERRORS_RETURN=None)
    channel = MpiChannel(constants, Half(), progress, lambda graceful: None)
    ends, memory = Ends(), memoryview(bytearray(8))
    channel.exchange(41, [(7, memory)], [(1, memory)], ends.of("exchange"))
    ((_, error),) = ends.wait(1)
    assert isinstance(error, CannotBegin)
    assert ["receive of tag 41"] in _ABANDONED


def test_what_follows_an_operation_may_fail_and_others_go_on(
    mpi: FakeMpi, progress: Progress, caplog: pytest.LogCaptureFixture
) -> None:
    ends = Ends()
    mpi.complete = {"x"}

    def broken(error: BaseException | None) -> None:
        raise ZeroDivisionError

    progress.submit(lambda: ["x"], broken)
    progress.submit(lambda: ["x"], ends.of("x"))
    assert ends.wait(1) == [("x", None)]
    assert "the callback of an MPI operation failed" in caplog.text


def test_stop_tells_whether_anything_was_pending(mpi: FakeMpi) -> None:
    idle, busy = Progress(mpi), Progress(mpi)
    busy.submit(lambda: ["never"], lambda error: None)
    assert mpi.testing.wait(_SECONDS)
    assert idle.stop()
    assert not busy.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "commsched-mpi"]
