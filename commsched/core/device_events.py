"""EventWatcher: turns the events of a device into calls. No thread of ours spins, and no engine thread waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

log = logging.getLogger("commsched")


class Event(Protocol):
    """A point in a device's queue of work, such as ``torch.cuda.Event(blocking=True)``."""

    def synchronize(self) -> None:
        """Return when the device has reached this point. Waits without the interpreter's lock. Raises the device's error if it
        failed."""


class _Now:
    def synchronize(self) -> None:
        pass


#: An event that has happened.
NOW: Event = _Now()


def _log(error: Exception) -> None:
    log.error("a call after an event of a device failed", exc_info=error)


_Item = tuple[Event, Callable[[], None], Callable[[Exception], None]]


class EventWatcher:
    """One thread that waits for events in the order in which they were given, which should be the order of their device queue.

    Events of several queues are reported no earlier than they happen, but maybe later.
    """

    def __init__(self, name: str) -> None:
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        self._lock = threading.Lock()  # no item may follow the end marker, None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call_after(self, event: Event, then: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Call ``then`` when ``event`` has happened. Call ``failed`` with the error if the event or ``then`` raised one. Never
        blocks. After :meth:`close`, neither is called."""
        self._put((event, then, failed))

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call ``call`` when all earlier :meth:`call_after` calls are carried out; after :meth:`close`, at once."""
        if not self._put((NOW, call, _log)):
            call()

    def close(self, within_seconds: float | None = None) -> bool:
        """Carry out all earlier :meth:`call_after` calls, then end the thread. False if an event did not happen
        ``within_seconds``; the thread then ends when it happens. Idempotent."""
        with self._lock:
            self._closed = True
            self._items.put(None)
        self._thread.join(within_seconds)
        return not self._thread.is_alive()

    def _put(self, item: _Item) -> bool:
        with self._lock:
            if not self._closed:
                self._items.put(item)
            return not self._closed

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            event, then, failed = item
            try:
                event.synchronize()
                then()
            except Exception as error:
                try:
                    failed(error)
                except Exception as bug:
                    _log(bug)
            del item, event, then, failed  # the objects that they hold must not stay alive until the next event
