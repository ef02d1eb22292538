"""The thread in which a client's listener is called."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger("commsched")


class CallbackThread:
    """Runs what is put, one after another, without any lock held, once started; ``on_error`` is told what a call raised."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="commsched-control-calls", daemon=True)

    def start(self) -> None:
        """Run what was put so far and what will be."""
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Run ``call`` soon; never blocks. Any thread."""
        with self._changed:
            self._calls.append(call)
            self._changed.notify()

    def close(self) -> None:
        """Drop what has not begun, wait for what has, end the thread; from a call, that is when the call returns."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._calls and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                call = self._calls.popleft()
            try:
                call()
            except Exception as error:
                log.exception("a listener of the control channel raised")
                self._on_error(error)
