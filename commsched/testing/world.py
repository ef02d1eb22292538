"""run_world: runs ranks as threads of one process, for tests."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar

from ..core.errors import error_text

T = TypeVar("T")

#: Time that the other ranks have to end after one rank has raised. They are expected to learn of the error and to end.
_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _End(Generic[T]):
    rank: int
    result: T | None = None
    error: BaseException | None = None


def run_world(world_size: int, fn: Callable[..., T], *args: Any, timeout_seconds: float = 60.0) -> list[T]:
    """Run ``fn(rank, *args)`` for every rank in its own thread. Return the results in rank order.

    Never hangs: a rank that does not end is named in the error, with its stack. Its thread is a daemon and is left behind.

    Raises:
        TimeoutError: a rank still ran after ``timeout_seconds``, and no rank had raised.
        BaseException: the first exception of a rank. If it says no more than that another rank ended by an exception, that
            exception: which of the two comes first is chance. Notes name the ranks that raised later or did not end.
    """
    ends: SimpleQueue[_End[T]] = SimpleQueue()
    threads = {
        rank: threading.Thread(target=_run_rank, args=(ends, rank, fn, args), name=f"rank-{rank}", daemon=True)
        for rank in range(world_size)
    }
    for thread in threads.values():
        thread.start()
    ended: dict[int, _End[T]] = {}
    failed: list[tuple[int, BaseException]] = []  # in the order in which ranks raised
    deadline = monotonic() + timeout_seconds
    while len(ended) < world_size:
        try:
            end = ends.get(timeout=max(0.0, deadline - monotonic()))
        except Empty:
            break
        ended[end.rank] = end
        threads[end.rank].join()
        if end.error is not None:
            failed.append((end.rank, end.error))
            deadline = min(deadline, monotonic() + _GRACE_SECONDS)
    stuck = [_where(rank, thread) for rank, thread in threads.items() if rank not in ended]
    if failed:
        told = str(failed[0][1])
        # These are the words by which a session tells the other ranks of an error.
        failed.sort(key=lambda each: not told.startswith(f"rank {each[0]} ended: {error_text(each[1])}"))
        (rank, error), *others = failed
        error.add_note(f"raised first, on rank {rank} of {world_size}")
        for note in (*(f"then on rank {other}: {error_text(later)}" for other, later in others if later is not error), *stuck):
            error.add_note(note)
        raise error
    if stuck:
        raise TimeoutError(f"not every rank ended within {timeout_seconds:g} s\n" + "\n".join(stuck))
    return [ended[rank].result for rank in range(world_size)]  # type: ignore[misc]


def _run_rank(ends: SimpleQueue[_End[T]], rank: int, fn: Callable[..., T], args: tuple[Any, ...]) -> None:
    try:
        ends.put(_End(rank, result=fn(rank, *args)))
    except BaseException as error:
        ends.put(_End(rank, error=error))


def _where(rank: int, thread: threading.Thread) -> str:
    collects = gc.isenabled()
    gc.disable()  # a collection within this call may wait for ever for a lock that the call holds (CPython 3.11.7, gh-106883)
    try:
        frame = sys._current_frames().get(thread.ident or 0)
    finally:
        if collects:
            gc.enable()
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "it has just ended\n"
    return f"rank {rank} still runs ({thread.name}), at:\n{stack}"
