"""Real jobs of real processes, started as a user would, for the tests of this folder."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "jobs" / "worker.py"

#: Limit for a whole job. A job of 20 s takes minutes on a busy machine.
HANGS_AFTER_SECONDS = 300.0


def clean_environ(**more: str) -> dict[str, str]:
    """This process's environment without any launcher's variables."""
    known = ("COMMSCHED_", "OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "MPI_")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(known)}
    return {**environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **more}


class Job:
    """``commsched run ...``, or another ``subcommand``, in the background. Ends, with everything it started, when the block is
    left. ``ignored``: signals that it is to find ignored, and no others, whatever started these tests. ``patient``: the test
    counts what the other processes say after one has failed (``patient.py``). ``within``: a command that runs it, as
    one does that enters a network namespace. ``imports``: what its processes have imported before they start
    (``tests/warm.py``); nothing if they start as a user's do. By default it is what the ranks of this folder need."""

    def __init__(
        self,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        subcommand: str = "run",
        ignored: Sequence[str] = (),
        patient: bool = False,
        within: Sequence[str] = (),
        imports: Sequence[str] | None = None,
    ) -> None:
        program = "tests.jobs.patient" if patient else "commsched"
        if imports is None:
            imports = warm.TORCH if "gloo" in arguments else warm.NUMPY
        self._imports = imports
        self._command = [*within, sys.executable, "-m", program, subcommand, *arguments]
        self._ignored = [signal.Signals[f"SIG{name}"] for name in ignored]
        self._environ = clean_environ(**(environ or {}))

    def __enter__(self) -> Job:
        self.process = warm.Popen(
            self._command,
            imports=self._imports,
            nested=True,
            ignored=self._ignored,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            finally:
                self._kill()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def _kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def lines(self, count: int) -> list[str]:
        """The next ``count`` lines of its stdout. A buffer would read ahead, which ``end`` would then not see."""
        assert self.process.stdout is not None
        lines = [b""] * count
        for number in range(count):
            while (byte := os.read(self.process.stdout.fileno(), 1)) not in (b"", b"\n"):
                lines[number] += byte
        return [line.decode().strip() for line in lines]

    def lines_until(self, last: str) -> list[str]:
        """The next lines of its stdout, up to the first that ends with ``last``, or to the end."""
        lines = self.lines(1)
        while lines[-1] and not lines[-1].endswith(last):
            lines += self.lines(1)
        return lines

    def end(self, timeout_seconds: float = HANGS_AFTER_SECONDS) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, once it has ended."""
        out, err = self.process.communicate(timeout=timeout_seconds)
        return self.process.returncode, out, err


def run_job(
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    timeout_seconds: float = HANGS_AFTER_SECONDS,
    subcommand: str = "run",
    patient: bool = False,
    imports: Sequence[str] | None = None,
) -> tuple[int, str, str]:
    """Run a job to its end."""
    with Job(*arguments, environ=environ, subcommand=subcommand, patient=patient, imports=imports) as job:
        return job.end(timeout_seconds)


def worker(*arguments: str) -> Sequence[str]:
    """The command of every rank."""
    return ["--", sys.executable, str(WORKER), *arguments]


def gone(pid: int, timeout_seconds: float = 60.0) -> bool:
    """Whether the process ends within the time; a zombie has ended. How soon it ends is what ``tests.soak strikes`` measures:
    here a busy machine has all the time it needs."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)  # somebody else's process: nothing could tell us
    return False


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports on which the process listens."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor))
        except OSError:
            continue  # closed meanwhile
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                address, _, port = words[1].rpartition(":")
                parts = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))  # each in the machine's order
                found.add((socket.inet_ntop(family, struct.pack(f"={len(parts)}I", *parts)), int(port, 16)))
    return found
