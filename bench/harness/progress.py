"""Progress lines of a rank's process, printed by this process while the job runs."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def relayed_lines() -> Iterator[str]:
    """Yields the path of a pipe. In this block, each line that a process writes to the pipe is printed."""
    with tempfile.TemporaryDirectory(prefix="commsched-bench-") as directory:
        path = Path(directory, "progress")
        os.mkfifo(path)
        # Open for writing too, so that opening does not block and the pipe ends only with this block.
        pipe = os.open(path, os.O_RDWR)
        with open(pipe) as lines:
            reader = threading.Thread(target=_relay, args=(lines,), name="commsched-bench-progress", daemon=True)
            reader.start()
            try:
                yield str(path)
            finally:
                os.write(pipe, b"\0\n")
                reader.join()


def _relay(lines: Iterator[str]) -> None:
    for line in lines:
        ended = line.endswith("\0\n")
        if ended:
            line = f"{line[:-2]}\n" if line[:-2] else ""  # an incomplete line, from a process that was killed
        with suppress(OSError, ValueError):  # nobody reads the output any more; who writes to the pipe must not wait for that
            print(line, end="", flush=True)
        if ended:
            return


def say(path: str, line: str) -> None:
    """Called in a rank's process: print ``line`` in the process that reads the pipe, if it is still there."""
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # to open it otherwise would wait for a reader for ever
        with open(pipe, "w") as lines:
            os.set_blocking(pipe, True)
            lines.write(f"{line}\n")
    except OSError:
        pass  # the reader has ended, and the job ends with it
