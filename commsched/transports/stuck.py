"""A way out of libraries whose waits for other ranks nothing can end."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..core.errors import CommschedError

#: For the library to notice, and the session to raise the cause by itself.
_GRACE_SECONDS = 2.0


@contextmanager
def ends_if_failed(when_failed: Callable[[Callable[[CommschedError], None]], None]) -> Iterator[None]:
    """If the job fails in this block, in which a thread waits in a library for ranks that may never come, and it is still there
    a moment later, say why and end the process: nothing else can."""
    left = threading.Event()

    def end(error: CommschedError) -> None:
        if left.wait(_GRACE_SECONDS):
            return
        print(f"commsched: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)

    def watch(error: CommschedError) -> None:
        if not left.is_set():
            threading.Thread(target=end, args=(error,), name="commsched-stuck", daemon=True).start()

    when_failed(watch)
    try:
        yield
    finally:
        left.set()
