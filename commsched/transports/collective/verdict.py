"""Who says first why the job failed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...core.errors import CommschedError
from ...core.ports import OnFailure

#: A rank that dies breaks connections of ranks that then break others'. The control channel knows who was first, but it may
#: hear of it a moment after the backend.
_GRACE_SECONDS = 2.0


class Verdict:
    """Tells ``on_failure`` of the first error reported here, unless the job's own verdict comes within a moment.

    Args:
        when_failed: calls its argument when the job has failed; see ``TransportContext``.
    """

    def __init__(
        self,
        on_failure: OnFailure,
        when_failed: Callable[[Callable[[CommschedError], None]], None],
        grace_seconds: float = _GRACE_SECONDS,
    ) -> None:
        self._on_failure = on_failure
        self._grace_seconds = grace_seconds
        self._lock = threading.Lock()
        self._known = False
        self._timer: threading.Timer | None = None
        when_failed(self._hear)

    def report(self, error: CommschedError) -> None:
        """Any thread; never blocks. Only the first counts."""
        with self._lock:
            if self._known:
                return
            self._known = True
            self._timer = threading.Timer(self._grace_seconds, self._on_failure, (error,))
            self._timer.name = "commsched-verdict"
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Tell nothing from now on. Idempotent; not from within ``on_failure``."""
        timer = self._settle()
        if timer is not None:
            timer.join()

    def _hear(self, error: CommschedError) -> None:
        self._settle()

    def _settle(self) -> threading.Timer | None:
        """Somebody knows better, or nobody wants to know."""
        with self._lock:
            self._known = True
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        return timer
