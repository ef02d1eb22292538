"""Operations that fail, many at once, and from any thread."""

from __future__ import annotations

import queue
import threading

import pytest
from mxnet import nd

from commsched import ClosedError, TransportError
from commsched.plugins.mxnet import operation
from commsched.plugins.mxnet.operation import Operation, fail, push, wait

ROUNDS, ARRAYS = 150, 8


def test_those_that_fail_do_so_in_one_thread_and_whoever_reads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """MXNet's memory is corrupted if several of its threads are told of failures at once."""
    complete_with = Operation._complete_with
    begun: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
    threads: set[int] = set()

    def complete_and_note(self: Operation, runtime_error: int | None) -> None:
        if runtime_error is not None:
            threads.add(threading.get_ident())
        complete_with(self, runtime_error)

    def fail_all() -> None:
        while (one := begun.get()) is not None:
            fail([one], TransportError("broken"))

    monkeypatch.setattr(Operation, "_complete_with", complete_and_note)
    failing = [threading.Thread(target=fail_all) for _ in range(2)]
    for thread in failing:
        thread.start()
    for _ in range(ROUNDS):
        arrays, copies = [nd.ones(50) for _ in range(ARRAYS)], [nd.zeros(50) for _ in range(ARRAYS)]
        for array, copy in zip(arrays, copies):
            push(begun.put, writes=[array])
            array.copyto(copy)
        for copy in copies:
            with pytest.raises(TransportError, match=r"^broken"):
                copy.wait_to_read()
        wait(arrays)
    for _ in failing:
        begun.put(None)
    for thread in failing:
        thread.join()
    assert len(threads) == 1
    assert not operation._running
    assert not operation._completing


def test_an_error_that_says_nothing_keeps_its_class() -> None:
    array = nd.ones(5)
    push(lambda own: fail([own], TransportError()), writes=[array])
    with pytest.raises(TransportError):
        array.wait_to_read()


def test_nothing_is_queued_that_the_engine_would_never_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its end; who waited for it would do so for ever."""
    ended = threading.Event()
    ended.set()
    monkeypatch.setattr(operation, "_ended", ended)
    with pytest.raises(ClosedError, match="MXNet's engine has ended with the interpreter"):
        push(Operation.complete, reads=[nd.ones(1)])
