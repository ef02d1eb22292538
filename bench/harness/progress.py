"""Progress lines of a rank's process, printed by this process while the job runs."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
        if line.endswith("\0\n"):
            print(line[:-2], end="\n" if line[:-2] else "", flush=True)  # an incomplete line, from a process that was killed
            return
        print(line, end="", flush=True)


def say(path: str, line: str) -> None:
    """Called in a rank's process: print ``line`` in the process that reads the pipe."""
    with open(path, "w") as pipe:
        pipe.write(f"{line}\n")
