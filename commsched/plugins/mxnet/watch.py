"""Watch: a warning when an average does not come. Who reads waits inside MXNet, where nothing could say so."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("commsched")

WARN_AFTER_SECONDS = 10.0


class Watch:
    """Looks now and then at what is ``awaited`` longest: a round and a tensor's name, or None. One thread, until
    it is closed."""

    def __init__(self, rank: int, awaited: Callable[[], tuple[int, str] | None]) -> None:
        self._rank = rank
        self._awaited = awaited
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commsched-mxnet-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        before = None
        while not self._closed.wait(WARN_AFTER_SECONDS):
            awaited = self._awaited()
            if awaited is not None and awaited == before:
                log.warning(
                    "rank %d has waited %g s and more for the average of '%s' in round %d",
                    self._rank,
                    WARN_AFTER_SECONDS,
                    awaited[1],
                    awaited[0],
                )
            before = awaited
