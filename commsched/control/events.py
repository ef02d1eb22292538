"""The callbacks of the control channel, and the thread that makes them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ..core import late_thread
from ..core.errors import CommschedError
from ..core.interrupted import is_held_here


class Listener:
    """Callbacks that the control channel invokes for its events. Each does nothing here: a listener overrides those that it
    needs.

    A control thread makes one call at a time, without holding any lock. A callback may call the client, except ``close`` and
    the methods that wait for other ranks."""

    def on_failure(self, error: CommschedError) -> None:
        """The job failed; ``error`` names the first cause. Called at most once."""

    def on_leave(self, rank: int) -> None:
        """Another rank, ``rank``, will send nothing more."""

    def on_parting(self, rank: int, release: Callable[[], None]) -> None:
        """Ranks only: another rank, ``rank``, has left and wants to end its process. Call ``release``, now or later, on any
        thread, when nothing on this rank waits for an average that ``rank`` took part in."""

    def on_end(self) -> None:
        """Servers only: every rank has left."""

    def on_message(self, rank: int, topic: str, value: Any) -> None:
        """Rank 0 only: ``rank`` sent ``value`` about ``topic`` to it. All values of a rank come before its ``on_leave``."""

    def on_announced(self, topic: str, value: Any) -> None:
        """Ranks other than rank 0 only: rank 0 announced ``value`` about ``topic``. It may do so even after it has left."""

    def hold_steps(self) -> dict[int, int]:
        """Ranks only: return, for each group, the first step that will not begin before ``switch_at``. Step 1 of a group
        that is not in the answer will not begin either."""
        return {}

    def switch_at(self, config: dict[str, Any], steps: dict[int, int], window: dict[str, Any]) -> None:
        """Ranks only: use ``config`` from step ``steps[group]`` of each group on. This rank may have yet to add some of the
        groups, and may have released others. ``window`` was proposed with it; empty if there was none."""


log = logging.getLogger("commsched")


class CallbackThread:
    """Runs the calls that are put, one after another, once started; holds no lock while it does. ``on_error`` receives any
    exception that a call raises. ``lazily``: there is no thread before the first call, unless none could be started when that
    may come."""

    def __init__(self, on_error: Callable[[Exception], None], lazily: bool = False) -> None:
        self._on_error = on_error
        # The first call may be of a failure at the interpreter's end.
        self._waits_for_a_call = lazily and not late_thread.START_EARLY
        self._may_run = False
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], object]] = deque()
        self._is_calling = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="commsched-control-calls", daemon=True)

    @property
    def interrupts(self) -> bool:
        """See ``ControlEnd.interrupts``."""
        return is_held_here(self._changed)

    def start(self) -> None:
        """Start to run the calls, both those put so far and later ones."""
        with self._changed:
            self._may_run = True
            self._start()

    def _start(self) -> None:
        """Called with the lock held."""
        if self._may_run and not self._closed and self._thread.ident is None and (self._calls or not self._waits_for_a_call):
            self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        """Enqueue ``call``; never blocks. Any thread."""
        with self._changed:
            self._calls.append(call)
            self._start()
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when all calls have run. Returns at once if this thread has not started or is closed."""
        with self._changed:
            if self._thread.is_alive():
                self._changed.wait_for(lambda: self._closed or not (self._calls or self._is_calling))

    def close(self) -> None:
        """Drop the calls that have not begun, wait for the running call, and end the thread. If a call closes it, the thread
        ends when that call returns."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_calling = False
                if not self._calls:
                    self._changed.notify_all()
                while not self._calls and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                call = self._calls.popleft()
                self._is_calling = True
            try:
                call()
            except Exception as error:
                log.exception("a listener of the control channel raised")
                self._on_error(error)
