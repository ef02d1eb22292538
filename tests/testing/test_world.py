import threading
from queue import SimpleQueue

import pytest

from commsched.core.errors import TransportError
from commsched.testing.world import run_world


def test_results_come_in_rank_order_from_named_threads() -> None:
    def fn(rank: int, word: str) -> tuple[int, str, str]:
        return rank, word, threading.current_thread().name

    assert run_world(3, fn, "x") == [(rank, "x", f"rank-{rank}") for rank in range(3)]


def test_ranks_run_at_the_same_time() -> None:
    barrier = threading.Barrier(4)
    assert sorted(run_world(4, lambda rank: barrier.wait(60))) == [0, 1, 2, 3]


def test_the_first_exception_is_raised_and_the_others_are_named_in_its_notes() -> None:
    first: SimpleQueue[threading.Thread] = SimpleQueue()

    def fn(rank: int) -> None:
        if rank == 1:
            first.put(threading.current_thread())
            raise KeyError("first")
        first.get(timeout=60).join(60)
        raise ValueError("second")

    with pytest.raises(KeyError, match="first") as raised:
        run_world(2, fn)
    assert raised.value.__notes__ == ["raised first, on rank 1 of 2", "then on rank 0: ValueError: second"]


def test_an_exception_comes_before_what_other_ranks_say_of_it() -> None:
    """A rank that is told of it may raise that sooner than the rank whose exception it is."""
    told: SimpleQueue[threading.Thread] = SimpleQueue()

    def fn(rank: int) -> None:
        if rank == 1:
            told.get(timeout=60).join(60)
            raise KeyError("cause")
        told.put(threading.current_thread())
        raise TransportError("rank 1 ended: KeyError: 'cause' (a note)")

    with pytest.raises(KeyError, match="cause") as raised:
        run_world(2, fn)
    assert raised.value.__notes__ == [
        "raised first, on rank 1 of 2",
        "then on rank 0: TransportError: rank 1 ended: KeyError: 'cause' (a note)",
    ]


def test_one_error_raised_on_every_rank_is_named_once() -> None:
    error = RuntimeError("shared")

    def fn(rank: int) -> None:
        raise error

    with pytest.raises(RuntimeError, match="shared") as raised:
        run_world(3, fn)
    assert len(raised.value.__notes__) == 1


def test_a_rank_that_hangs_is_named_with_where_it_stands() -> None:
    release = threading.Event()

    def stand_at_the_gate(rank: int) -> None:
        if rank == 1:
            release.wait(60)

    with pytest.raises(TimeoutError) as raised:
        run_world(2, stand_at_the_gate, timeout_seconds=1.0)
    release.set()
    said = str(raised.value)
    assert said.startswith("not every rank ended within 1 s\nrank 1 still runs (rank-1), at:\n")
    assert "in stand_at_the_gate" in said
    assert "rank 0 still runs" not in said


def test_an_exception_is_raised_though_another_rank_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commsched.testing.world._GRACE_SECONDS", 0.05)
    release = threading.Event()

    def fn(rank: int) -> None:
        if rank == 0:
            raise KeyError("cause")
        release.wait(60)

    with pytest.raises(KeyError, match="cause") as raised:
        run_world(2, fn)
    release.set()
    assert raised.value.__notes__[1].startswith("rank 1 still runs (rank-1), at:\n")


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    run_world(4, lambda rank: None)
    assert set(threading.enumerate()) <= before  # a rank that an earlier test released may end meanwhile
