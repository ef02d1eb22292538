"""Ends a job whose launcher was killed: a process that ``launch.py`` starts, and this file is all that it runs.

Its stdin is a pipe from the launcher: the process group of each process of the job as it is started, a line each, and "done" at
the end. A pipe that ends without that means that nobody is there any more to end them.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

#: Between SIGTERM and SIGKILL.
KILL_SECONDS = 2.0


def main(directory: str) -> None:
    """Wait for the launcher's end; ``directory`` is its temporary one."""
    process_groups = []
    for line in sys.stdin:
        if line == "done\n":
            return
        process_groups.append(int(line))
    for number, seconds in ((signal.SIGTERM, KILL_SECONDS), (signal.SIGKILL, 0.0)):
        for process_group in process_groups:
            try:
                os.killpg(process_group, number)
            except (ProcessLookupError, PermissionError):
                pass  # it is gone, and its number may be somebody else's by now
        time.sleep(seconds)  # their parent is gone: there is nothing to wait for them by
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
