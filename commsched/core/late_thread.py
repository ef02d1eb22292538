"""Threads that work when the interpreter ends, which is when most sessions close. Python 3.12 starts no thread then, unlike
Python 3.11 and 3.13."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

#: Whether a thread that may be wanted at the interpreter's end must be started before.
START_EARLY = sys.version_info[:2] == (3, 12)


class LateThread:
    """A thread for one call, which comes late. Make it while threads can be started."""

    def __init__(self, name: str) -> None:
        self._call: Callable[[], object] | None = None
        self._may_run = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        if START_EARLY:
            self._thread.start()

    def run(self, call: Callable[[], object], within_seconds: float) -> bool:
        """Make ``call`` in the thread, and wait for its end for ``within_seconds`` at most. Returns whether it has ended. Later
        runs only wait."""
        if self._call is None:
            if self._thread.ident is None:
                self._thread.start()
            self._call = call
            self._may_run.set()
        self._thread.join(within_seconds)
        return not self._thread.is_alive()

    def forget(self) -> None:
        """End the thread if it was started. It makes no call any more."""
        self._may_run.set()

    def _run(self) -> None:
        self._may_run.wait()
        if self._call is not None:
            self._call()
