"""Stands for a Python process where another program must start it, as mpiexec does: stand_in.py ADDRESS ARGUMENT ...

It lets a fork run ``python ARGUMENT ...`` (``tests/warm.py``), with its own environment, directory and descriptors, and ends as
the fork does. The fork is killed if this process ends first.
"""

import json
import os
import signal
import socket
import sys


def inherited() -> list[int]:
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number > 2 and os.get_inheritable(number):
                found.append(number)
        except OSError:
            continue  # it was that of the listing
    return found


def main() -> None:
    passed = inherited()
    go, its_go = socket.socketpair()
    request = {
        "argv": sys.argv[2:],
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "passed": passed,
        "namespace": None,
        "new_session": False,
        "ignored": [],
        "nested": False,
    }
    text = json.dumps(request).encode()
    link = socket.socket(socket.AF_UNIX)
    link.connect(f"\0{sys.argv[1]}")
    link.sendall(len(text).to_bytes(8, "big"))
    socket.send_fds(link, [b"f"], [its_go.fileno(), 0, 1, 2, *passed])
    link.sendall(text)
    go.sendall(b"g")
    status = link.recv(8)
    if not status:
        sys.exit("the process that forks has ended")
    code = os.waitstatus_to_exitcode(int.from_bytes(status, "big"))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
