"""A witness reports whether a process runs, to members that receive no heartbeats from it. ``witnessed.py`` starts a process
that runs only this file.

Heartbeats are sent by Python threads, so a call into C that holds the interpreter's lock for long stops them. Such a call does
not stop another process. The witness sleeps until a member asks it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys

#: A witness sends one of these answers to each caller, and then ends the connection.
RUNS, STOPPED = b"commsched: it runs\n", b"commsched: it is stopped\n"

#: Interval at which to check whether the process has ended, if the kernel does not notify of that.
_LOOK_MS = 1000


def main(listening_fd: int, pid: int) -> None:
    """Answer at ``listening_fd`` for the process ``pid``, which started this one, until that process ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # these are meant for the process, which may go on
        signal.signal(number, signal.SIG_IGN)
    listening = socket.socket(fileno=listening_fd)
    listening.setblocking(False)
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    timeout: int | None = _LOOK_MS
    try:
        poll.register(os.pidfd_open(pid), select.POLLIN)
        timeout = None
    except (AttributeError, OSError):
        pass
    while os.getppid() == pid:
        poll.poll(timeout)
        try:
            asking, _ = listening.accept()
        except OSError:
            continue  # no member asks, or the member that asked is gone
        with asking:
            asking.setblocking(False)  # so few bytes fit; a stranger must not block this process
            try:
                asking.send(RUNS if runs(pid) else STOPPED)
            except OSError:
                pass


def runs(pid: int) -> bool:
    """Whether the process is neither stopped nor about to end. A sleeping process counts as running: the call that holds the
    interpreter's lock may wait."""
    state, is_dumped = _state(pid)
    return state in ("R", "S", "D", "I") and not is_dumped


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process. One that is about to end, or in a debugger, is not stopped."""
    return _state(pid)[0] == "T"


def _state(pid: int) -> tuple[str, bool]:
    """The letter of the process's state, empty if there is none, and whether the kernel is writing its core dump."""
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except (OSError, ValueError):
        return "", False
    return fields.get("State", "").strip()[:1], fields.get("CoreDumping", "0").strip() != "0"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
