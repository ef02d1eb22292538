"""A job of the soak while it runs: what its processes say, how it is struck from outside, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.jobs.job import Job

#: The variable by which the processes of a job are known, whoever started them.
MARK = "SOAK_JOB"


def processes_of(mark: str) -> list[int]:
    """The living processes of a job."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = Path("/proc", pid, "environ").read_bytes()
        except OSError:
            continue
        if f"\0{MARK}={mark}\0".encode() in b"\0" + environ:  # a process that has ended has no environment
            found.append(int(pid))
    return found


def sockets_of(pid: int) -> int:
    """How many sockets the process has."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += os.readlink(descriptor).startswith("socket:")
        except OSError:
            continue
    return count


def namespaces() -> set[str]:
    path = Path("/run/netns")
    return {each.name for each in path.iterdir() if each.name.startswith("commsched-")} if path.is_dir() else set()


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def soon(condition: Callable[[], bool], within_seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + within_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Running:
    """The launchers of a job, of which the first decides."""

    def __init__(self, jobs: Sequence[Job], mark: str) -> None:
        self._jobs = jobs
        self._mark = mark
        self.out: list[str] = []
        self.err: list[str] = []
        pipes = [(job.process.stdout, self.out) for job in jobs] + [(job.process.stderr, self.err) for job in jobs]
        self._readers = [threading.Thread(target=self._read, args=each, daemon=True) for each in pipes]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: object, lines: list[str]) -> None:
        lines.extend(iter(pipe.readline, ""))  # type: ignore[attr-defined]

    def end(self, within_seconds: float) -> int | None:
        """The first launcher's exit code, once all have ended. None: one has not, and all of them were killed. Their processes
        show first where each is."""
        deadline = time.monotonic() + within_seconds
        for job in self._jobs:
            try:
                job.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                for number in (signal.SIGCONT, signal.SIGABRT):  # PYTHONFAULTHANDLER
                    self._kill(number)
                time.sleep(2.0)
                self._kill(signal.SIGKILL)
                return None
            finally:
                for reader in self._readers:
                    reader.join(2.0)
        return self._jobs[0].process.returncode

    def _kill(self, number: int) -> None:
        for pid in processes_of(self._mark):
            strike(pid, number)

    def begun(self) -> list[tuple[int, float]]:
        """The pids of ranks, and when each began to train, or did so anew."""
        found = re.findall(r"^rank \d+ of \d+ pid (\d+) step \d+ at ([\d.]+)$", "".join(self.out), re.MULTILINE)
        return [(int(pid), float(at)) for pid, at in found]

    def hail(self, ranks: int, strikes: Sequence[tuple[float, int, str]]) -> list[str]:
        """Strike living ranks, one after another, once all ``ranks`` train. Return what was done."""
        done = []
        soon(lambda: len(self.begun()) >= ranks or self._jobs[0].process.poll() is not None, 60.0)
        for seconds, number, how in strikes:
            time.sleep(seconds)
            living = set(processes_of(self._mark))
            ranks_now = [pid for pid in dict.fromkeys(pid for pid, _ in self.begun()) if pid in living]
            if ranks_now and strike(ranks_now[number % len(ranks_now)], getattr(signal, f"SIG{how}")):
                done.append(how)
        return done


def strike(pid: int, number: int) -> bool:
    """Send a signal. Whether there was somebody to get it."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
