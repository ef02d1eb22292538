"""Code that Python runs in the midst of other code of its thread: signal handlers and finalizers. If that other code has a
lock of commsched, they must not wait: others need the lock, and what the lock guards may be half changed. Nor may they wait in
a thread of commsched, since averages come by those."""

from __future__ import annotations

import threading
from typing import cast

#: The message of the error raised instead of such a wait.
INTERRUPTED = (
    "a signal handler or a finalizer waits for commsched, but has interrupted its thread within commsched: let it note what is "
    "to be done, and do that in the training loop"
)


def is_held_here(lock: threading.RLock | threading.Condition) -> bool:
    """Whether the calling thread has ``lock``, a reentrant one, or a condition around such a lock."""
    return cast("bool", lock._is_owned())  # type: ignore[union-attr]  # Condition relies on it, too


def is_own_thread() -> bool:
    """Whether the calling thread is one of commsched's. All of them have such a name, and no other has."""
    return threading.current_thread().name.startswith("commsched-")
