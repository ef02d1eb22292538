"""Threads in which a read of the user's code may not wait."""

from __future__ import annotations

import threading

from ...core.errors import UnsupportedError
from ...core.interrupted import is_own_thread


def require_may_wait(what: str) -> None:
    """Require that the calling thread may wait for averages. Those of commsched may not, since averages come by them. The code
    of a user runs there all the same: Python collects garbage, and calls finalizers, in whichever thread makes objects.

    Args:
        what: what is read, as the subject of a clause.

    Raises:
        UnsupportedError: this is a thread of commsched. Python logs what a finalizer raises, and goes on.
    """
    if is_own_thread():
        name = threading.current_thread().name
        raise UnsupportedError(
            f"{what} is read in the thread {name} of commsched, which may not wait for averages: a finalizer (__del__, or "
            "weakref.finalize) that Python's garbage collector has called there, say. Read it in the training loop"
        )
