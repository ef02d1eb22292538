"""The one thread that calls MPI while a transport is open.

MPI moves data only while it is called, and its own waiting calls burn a core. So this thread tests the pending requests,
pauses, and tests again. While nothing is pending it is blocked and costs nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from ....core.errors import error_text
from ...collective.channel import CannotBegin, Done

log = logging.getLogger("commsched")

#: Shortest and longest pause between two tests. The kernel adds about 50 us to each (its timer slack).
SHORTEST_PAUSE_SECONDS = 50e-6
LONGEST_PAUSE_SECONDS = 1e-3
#: A pause is this fraction of the time since an operation last began or ended, so pauses add at most that to a transfer.
_PAUSE_SHARE = 1 / 64

#: Longer than one MPI call takes, unless it hangs.
_STOP_SECONDS = 1.0

#: Starts operations and returns their requests; called by the progress thread.
Begin = Callable[[], list[Any]]


class Progress:
    """Runs the operations given to :meth:`submit`, in order, in a thread of its own, ``commsched-mpi``.

    After a failure of MPI every operation, pending or new, fails with the same error: MPI promises nothing after a failure.
    """

    def __init__(self, MPI: Any) -> None:
        self._MPI = MPI
        self._submitted: SimpleQueue[tuple[Begin, Done] | None] = SimpleQueue()
        self._pending = _Pending(MPI)
        self._failure: BaseException | None = None
        self._stopping = False
        self.used = False  # whether any operation ever had requests
        self._thread = threading.Thread(target=self._run, name="commsched-mpi", daemon=True)
        self._thread.start()

    def submit(self, begin: Begin, done: Done) -> None:
        """Call ``begin`` in the progress thread, and ``done`` once the requests of ``begin`` have ended. Thread-safe."""
        self._submitted.put((begin, done))

    def stop(self) -> bool:
        """End the thread without waiting for pending requests. Callable from any thread but its own.

        The memory of pending operations stays referenced for ever, because MPI may still write there.

        Returns:
            Whether the thread ended and no request was pending.
        """
        self._stopping = True
        self._submitted.put(None)
        self._thread.join(_STOP_SECONDS)
        if self._pending.requests:
            abandon(self._pending.requests)
        return not self._thread.is_alive() and not self._pending.requests

    def _run(self) -> None:
        changed_at = monotonic()
        while not self._stopping:
            if self._begin_submitted(monotonic() - changed_at):
                changed_at = monotonic()
            if self._stopping:
                return
            try:
                ended = self._pending.test()
            except Exception as error:
                self._failure = error
                ended = self._pending.all()
            if ended:
                changed_at = monotonic()
            for done in ended:
                self._tell(done, self._failure)

    def _begin_submitted(self, unchanged_seconds: float) -> bool:
        """Wait for an operation to begin: without limit if nothing is pending, else for one pause. Returns if one began."""
        began = False
        try:
            item = self._submitted.get(timeout=self._pause_seconds(unchanged_seconds))
            while item is not None:
                self._begin(*item)
                began = True
                item = self._submitted.get_nowait()
        except Empty:
            pass
        return began

    def _pause_seconds(self, unchanged_seconds: float) -> float | None:
        if not self._pending.requests:
            return None
        return min(max(unchanged_seconds * _PAUSE_SHARE, SHORTEST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)

    def _begin(self, begin: Begin, done: Done) -> None:
        if self._failure is None:
            try:
                requests = begin()
            except Exception as error:
                self._failure = CannotBegin(error_text(error))
                for pending in self._pending.all():
                    self._tell(pending, self._failure)
            else:
                if requests:
                    self.used = True
                    self._pending.add(requests, done)
                    return
        self._tell(done, self._failure)

    def _tell(self, done: Done, error: BaseException | None) -> None:
        try:
            done(error)
        except Exception:
            log.exception("the callback of an MPI operation failed")


class _Pending:
    """Incomplete requests, and the ``done`` of each operation, called when all its requests are complete. Used by the progress
    thread."""

    def __init__(self, MPI: Any) -> None:
        self._test: Callable[[list[Any]], list[int] | None] = MPI.Request.Testsome
        self.requests: list[Any] = []
        self._operations: list[_Operation] = []  # the operation of each request

    def add(self, requests: list[Any], done: Done) -> None:
        operation = _Operation(len(requests), done)
        self.requests += requests
        self._operations += [operation] * len(requests)

    def test(self) -> list[Done]:
        """Let MPI work, and return the ``done`` of each operation that is now complete."""
        if not self.requests:
            return []
        ended = []
        for index in self._test(self.requests) or ():
            operation = self._operations[index]
            operation.missing -= 1
            if operation.missing == 0:
                ended.append(operation.done)
            self.requests[index] = None
        self._operations = [o for o, request in zip(self._operations, self.requests, strict=True) if request is not None]
        self.requests = [request for request in self.requests if request is not None]
        return ended

    def all(self) -> list[Done]:
        """Give up all operations, and return their ``done``. The requests are kept, and so is memory that MPI may use."""
        lost = list({id(operation): operation for operation in self._operations}.values())
        abandon(self.requests)
        self.requests, self._operations = [], []
        return [operation.done for operation in lost]


@dataclass(slots=True, eq=False)
class _Operation:
    missing: int  # requests that are not complete
    done: Done


#: Requests that are not awaited any more. They hold references to their memory.
_ABANDONED: list[Any] = []


def abandon(requests: list[Any]) -> None:
    """Keep ``requests``, which are not awaited any more, and with them the memory that MPI may still use."""
    _ABANDONED.append(requests)
