"""EventWatcher: turns the events of a device into calls, without a thread of ours that spins or an engine's that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol


class Event(Protocol):
    """A point on a device's queue of work, as ``torch.cuda.Event(blocking=True)``."""

    def synchronize(self) -> None:
        """Return when the device has come to it, without the interpreter's lock; raises what the device failed with."""
        ...


class _Now:
    def synchronize(self) -> None:
        pass


_Item = tuple[Event, Callable[[], None], Callable[[Exception], None]]


class EventWatcher:
    """One thread that waits for events in the order in which they were given: that of the device's queue they are from.

    Events of several queues are reported no earlier than they happen, but maybe later.
    """

    def __init__(self, name: str) -> None:
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        self._lock = threading.Lock()  # nothing may come behind the end
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call_after(self, event: Event, then: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Call ``then`` when ``event`` has happened; or ``failed`` with what the event, or ``then``, raised. Never blocks.
        After :meth:`close`, neither is called."""
        self._put((event, then, failed))

    def settle(self) -> None:
        """Return when everything given before has been called; after :meth:`close` at once."""
        settled = threading.Event()
        if self._put((_Now(), settled.set, lambda _: None)):
            settled.wait()

    def close(self, within_seconds: float | None = None) -> bool:
        """Call what was given before, then end the thread. False if an event did not happen ``within_seconds``; the thread
        then ends when it does. Idempotent."""
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
                failed(error)
            del item, event, then, failed  # what they hold must not live until the next comes
