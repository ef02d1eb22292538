"""SIGINT and SIGTERM as exceptions that can be put off, so that nothing started is forgotten.

Signals belong to the process, and so does the state here.
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
    """In this block SIGINT raises KeyboardInterrupt and SIGTERM raises SystemExit(143), but not inside :func:`deferred`.

    In a thread other than the main one, which Python gives no signals, it does nothing.
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
    """A signal that comes in this block is raised at its end. For steps that must not be left half done."""
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
