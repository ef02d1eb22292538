"""Watch: reports an average that does not arrive. Readers wait inside MXNet, which cannot report it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

WARN_AFTER_SECONDS = 10.0


class OverdueWatch:
    """Checks periodically which average is awaited longest. Uses one thread until ``close``.

    Args:
        awaited: returns the round and the tensor of that average, or ``None`` if no average is awaited.
        stalled: called with the tensor and the seconds if two checks in a row find the same average, and at each later check.
    """

    def __init__(self, awaited: Callable[[], tuple[int, int] | None], stalled: Callable[[int, float], None]) -> None:
        self._awaited = awaited
        self._stalled = stalled
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commsched-mxnet-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        before, since = None, 0.0
        while not self._closed.wait(WARN_AFTER_SECONDS):
            awaited = self._awaited()
            if awaited is None or awaited != before:
                before, since = awaited, monotonic()
            else:
                self._stalled(awaited[1], monotonic() - since)
