"""Ends a process that is stuck in a library whose wait for other ranks cannot be ended otherwise."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...core import timeouts
from ...core.errors import CommschedError
from ...core.standard_streams import say_error
from ..context import WhenFailed


@contextmanager
def exit_if_job_fails(when_failed: WhenFailed) -> Iterator[None]:
    """End the process if the job fails in this block and the block has not ended ``STUCK_LIBRARY_SECONDS`` later.

    In this block a thread waits in a library for ranks that may never come, and nothing else can end that wait. The error of
    the job is printed first.
    """
    left = threading.Event()

    def end(error: CommschedError) -> None:
        if left.wait(timeouts.STUCK_LIBRARY_SECONDS):
            return
        say_error(f"commsched: {type(error).__name__}: {error}")
        os._exit(1)

    def watch(error: CommschedError) -> None:
        if not left.is_set():
            threading.Thread(target=end, args=(error,), name="commsched-stuck", daemon=True).start()

    when_failed(watch)
    try:
        yield
    finally:
        left.set()
