"""Ends a job whose launcher was killed. ``launch.py`` starts the guard as a process that runs only this file.

The guard's stdin is a pipe from the launcher. Each process of the job, when it starts, adds a line with its process group; the
launcher adds "reaped" and the group before it reaps such a process, and "done" at the end. If the pipe ends without "done", the
launcher is gone and cannot end the processes any more.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

#: Time between SIGTERM and SIGKILL.
KILL_SECONDS = 2.0

REAPED = "reaped"


def main(directory: str) -> None:
    """Wait for the launcher's end. If it was killed, end the job's processes and remove ``directory``, the launcher's temporary
    directory."""
    process_groups: list[int] = []
    for line in sys.stdin:
        if line == "done\n":
            return
        *reaped, process_group = line.split()
        if reaped:
            process_groups.remove(int(process_group))  # other processes may have the number by now
        else:
            process_groups.append(int(process_group))
    for number, seconds in ((signal.SIGTERM, KILL_SECONDS), (signal.SIGKILL, 0.0)):
        for process_group in process_groups:
            try:
                os.killpg(process_group, number)
            except (ProcessLookupError, PermissionError):
                pass  # the group is gone, and its number may belong to other processes by now
        time.sleep(seconds)  # the processes are no children of this one, so it cannot wait for them
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
