"""SIGINT and SIGTERM as exceptions that can be deferred, so that every started process is cleaned up.

Signals belong to the process; therefore the state here is global.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_deferrals = 0
_pending: int | None = None


@contextmanager
def handled() -> Iterator[None]:
    """In this block SIGINT raises KeyboardInterrupt and SIGTERM raises SystemExit(143), except inside :func:`deferred`.

    Outside the main thread it does nothing, because Python delivers signals to the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """A signal that arrives in this block is raised at the end of the block. Use it for steps that must not be interrupted."""
    global _deferrals, _pending
    _deferrals += 1
    try:
        yield
    finally:
        _deferrals -= 1
        if _deferrals == 0 and _pending is not None:
            number, _pending = _pending, None
            _raise(number)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _pending
    if _deferrals:
        _pending = _pending or number
    else:
        _raise(number)


def _raise(number: int) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
