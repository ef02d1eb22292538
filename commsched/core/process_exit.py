"""How this process ends with an error once the interpreter runs exit handlers, which cannot change its exit code."""

from __future__ import annotations

import os
from collections.abc import Callable

_leave: Callable[[int], object] = os._exit


def leave(code: int) -> None:
    """End this process now; everything that is to be printed has been. Does not return."""
    _leave(code)


def leave_by(way: Callable[[int], object]) -> None:
    """From now on :func:`leave` calls ``way``, which does not return: a launcher wants to be told, say."""
    global _leave
    _leave = way
