"""The end of this process with an error: which error ended it, and how an exit handler ends it. An exit handler cannot change
the exit code otherwise."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from .errors import error_text

_leave: Callable[[int], object] = os._exit
_exit_code: object = None  # the exit code of the interpreter, if it is known


def leave(code: int) -> None:
    """End this process now. The caller has printed and flushed all output. Does not return."""
    _leave(code)


def leave_by(way: Callable[[int], object]) -> None:
    """Let :func:`leave` call ``way``, which must not return, from now on; a launcher must be notified, for example."""
    global _leave
    _leave = way


def code_of(error: BaseException) -> int:
    """The exit code of a process that ``error`` ends before its work is done; never 0."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    code = error.code if isinstance(error, SystemExit) else None
    return code if isinstance(code, int) and code != 0 else 1


def watch() -> None:
    """Let :func:`error` also report a ``sys.exit`` from now on, which otherwise leaves no trace that an exit handler could see.
    Idempotent."""
    if not isinstance(sys.exit, _Exit):
        sys.exit = _Exit(sys.exit)


def error() -> str | None:
    """The error that ends this process, for exit handlers: an exception or an exit code. ``None`` means that it ends without a
    known error. The code of ``raise SystemExit(code)`` is not known, nor is the code of a ``sys.exit`` that was imported by
    name before :func:`watch`."""
    raised = getattr(sys, "last_value", None)  # set by the interpreter when it printed an unhandled exception
    if raised is not None:
        return error_text(raised)
    if _exit_code is None or (isinstance(_exit_code, int) and _exit_code == 0):
        return None
    return f"exit code {int(_exit_code)}" if isinstance(_exit_code, int) else error_text(SystemExit(_exit_code))


class _Exit:
    """``sys.exit``, which also records the exit code if it ends the interpreter."""

    def __init__(self, original: Callable[[Any], NoReturn]) -> None:
        self._original = original

    def __call__(self, status: Any = None, /) -> NoReturn:
        if threading.current_thread() is not threading.main_thread():
            self._original(status)  # ends this thread only
        raise _MainExit(status)


class _MainExit(SystemExit):
    """The exception that ``sys.exit`` raises in the main thread. The script may catch it and continue, so only the
    interpreter's own access to ``code`` counts: it is the only access without a calling Python frame."""

    @property  # type: ignore[override]
    def code(self) -> object:
        status = self.args[0] if self.args else None
        try:
            sys._getframe(1)
        except ValueError:
            global _exit_code
            _exit_code = status
        return status

    @code.setter
    def code(self, status: object) -> None:
        self.args = (status,)


_MainExit.__name__ = _MainExit.__qualname__ = "SystemExit"  # the name that a traceback shows
