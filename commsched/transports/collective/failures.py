"""Failures of a library of collectives: one that it reports is delayed, and one that it cannot report ends the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...core import timeouts
from ...core.errors import CommschedError, error_text
from ...core.interfaces import OnFailure
from ...core.standard_streams import say_error
from ..backend import WhenFailed


class DeferredFailure:
    """Passes the first reported error to ``on_failure`` after a grace time, unless the job has failed by then.

    Args:
        when_failed: calls its argument when the job has failed; see ``TransportContext``.
        grace_seconds: how long the job's own failure is awaited.
    """

    def __init__(
        self,
        on_failure: OnFailure,
        when_failed: WhenFailed,
        grace_seconds: float = timeouts.BACKEND_FAILURE_SECONDS,
    ) -> None:
        self._on_failure = on_failure
        self._grace_seconds = grace_seconds
        self._lock = threading.Lock()
        self._known = False
        self._timer: threading.Timer | None = None
        when_failed(self._hear)

    def report(self, error: CommschedError) -> None:
        """Report an error. Callable from any thread. Only the first error counts. It does not block, but when an interpreter of
        Python 3.12 ends: no thread can be started then, so the caller calls ``on_failure`` at once."""
        with self._lock:
            if self._known:
                return
            self._known = True
            self._timer = threading.Timer(self._grace_seconds, self._on_failure, (error,))
            self._timer.name = "commsched-verdict"
            self._timer.daemon = True
            try:
                self._timer.start()
                return
            except RuntimeError:  # Python 3.12 starts no thread at the interpreter's end
                self._timer = None
        self._on_failure(error)

    def close(self) -> None:
        """Stop reporting. Idempotent. Must not be called from within ``on_failure``."""
        timer = self._settle()
        if timer is not None:
            timer.join()

    def _hear(self, error: CommschedError) -> None:
        self._settle()

    def _settle(self) -> threading.Timer | None:
        """Cancel the pending report: the job's failure is known, or this object is closed."""
        with self._lock:
            self._known = True
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        return timer


@contextmanager
def exit_if_job_fails(when_failed: WhenFailed) -> Iterator[None]:
    """End the process if the job fails in this block and the block has not ended ``STUCK_LIBRARY_SECONDS`` later.

    In this block a thread waits in a library for ranks that may never come, and nothing else can end that wait. The error of
    the job is printed first.
    """
    left = threading.Event()

    def end(error: CommschedError) -> None:
        if left.wait(timeouts.STUCK_LIBRARY_SECONDS):
            return
        say_error(f"commsched: {error_text(error)}")
        os._exit(1)

    def watch(error: CommschedError) -> None:
        if not left.is_set():
            threading.Thread(target=end, args=(error,), name="commsched-stuck", daemon=True).start()

    when_failed(watch)
    try:
        yield
    finally:
        left.set()
