"""``commsched run``: start the ranks, and servers if asked, of one job on this machine, and leave nothing behind."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from types import FrameType

from . import guard
from .core.errors import TransportError

#: After the first failure the others may end by themselves, naming its cause, before they are terminated and then killed.
GRACE_SECONDS = 5.0


def run(ranks: int, servers: int, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run ``command`` once per rank and return the exit code: 0, or that of the first process that failed.

    ``environ`` is the environment of every process, to which those variables are added that make it one of the job. Installs
    handlers that pass SIGINT, SIGTERM and SIGHUP on to every process, so it must be called from the main thread; a SIGINT or
    SIGHUP that is ignored stays so.
    """
    with tempfile.TemporaryDirectory(prefix="commsched-") as directory:
        environ = {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),  # else every rank's engine takes all cores
            **environ,
            "COMMSCHED_TOKEN": secrets.token_hex(32),
            "COMMSCHED_RENDEZVOUS": f"{directory}/control.json",
            # What torchrun sets, for scripts that share out their data by it or initialise torch.distributed.
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        job = _Job(directory)
        try:
            if servers:
                environ["COMMSCHED_SERVERS"] = ",".join(job.start_server(environ) for _ in range(servers))
            for rank in range(ranks):
                job.start_rank(command, environ, rank, ranks)
            return job.wait()
        except _Interrupted:
            return job.exit_code(0)
        finally:
            job.kill()


class _Job:
    """The processes of one job, each in a session of its own so that its children end with it. ``directory`` is removed by
    their guard, should this process be killed."""

    def __init__(self, directory: str) -> None:
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._sessions: list[int] = []  # of all processes ever started: what they started may outlive them
        self._ranks: set[int] = set()
        self._timers: list[threading.Timer] = []
        self._interrupted = 0
        # Without site packages and environment: it is to be there at once, whatever the job's Python is like.
        self._guard = subprocess.Popen(
            [sys.executable, "-IS", guard.__file__, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup, or a shell's & set it
                signal.signal(number, self._pass_on)

    def start_server(self, environ: Mapping[str, str]) -> str:
        command = [sys.executable, "-m", "commsched", "server", "--bind", "127.0.0.1:0"]
        process = self._start(command, environ, stdout=subprocess.PIPE)
        assert process.stdout is not None
        line = process.stdout.readline()
        if "listening on " not in line:
            self._require_not_interrupted()
            raise TransportError(f"a parameter server did not start; it said {line!r}")
        return line.rsplit(" ", 1)[1].strip()

    def start_rank(self, command: Sequence[str], environ: Mapping[str, str], rank: int, ranks: int) -> None:
        world = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        place = {f"{prefix}{name}": str(value) for prefix in ("COMMSCHED_", "") for name, value in world.items()}
        self._ranks.add(self._start(command, {**environ, **place}).pid)

    def _start(self, command: Sequence[str], environ: Mapping[str, str], stdout: int | None = None) -> subprocess.Popen[str]:
        self._require_not_interrupted()
        process = subprocess.Popen(
            command,
            env=environ,
            stdout=stdout,
            text=True,
            start_new_session=True,
            # The process itself, before it runs anything: this one might be killed before it could.
            preexec_fn=lambda: self._tell_guard(os.getpid()),
        )
        self._processes[process.pid] = process
        self._sessions.append(process.pid)
        return process

    def wait(self) -> int:
        """Until every process has ended; the first failure, or the end of the last rank, sets the others a time."""
        first_failure = 0
        while self._processes:
            pid, status = os.wait()
            process = self._processes.pop(pid, None)
            if process is None:
                continue
            process.returncode = os.waitstatus_to_exitcode(status)
            self._ranks.discard(pid)
            if process.returncode != 0 and not first_failure:
                first_failure = process.returncode if process.returncode > 0 else 128 - process.returncode
                self._end_soon()
            elif not self._ranks and self._processes:
                self._end_soon()
        return self.exit_code(first_failure)

    def exit_code(self, first_failure: int) -> int:
        return 128 + self._interrupted if self._interrupted else first_failure

    def _end_soon(self) -> None:
        if not self._timers:
            for seconds, number in ((GRACE_SECONDS, signal.SIGTERM), (GRACE_SECONDS + guard.KILL_SECONDS, signal.SIGKILL)):
                timer = threading.Timer(seconds, self._signal, [number])
                timer.daemon = True
                timer.start()
                self._timers.append(timer)

    def kill(self) -> None:
        """End what is left, at once."""
        for timer in self._timers:
            timer.cancel()
        for process_group in self._sessions:
            _kill_group(process_group, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._tell_guard("done")
        self._guard.wait()

    def _tell_guard(self, line: object) -> None:
        assert self._guard.stdin is not None
        try:
            os.write(self._guard.stdin.fileno(), f"{line}\n".encode())
        except BrokenPipeError:
            pass  # somebody killed it: this process ends the job as long as it lives itself

    def _require_not_interrupted(self) -> None:
        if self._interrupted:
            raise _Interrupted

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = self._interrupted or number
        self._signal(number)
        self._end_soon()

    def _signal(self, number: int) -> None:
        for pid in list(self._processes):
            _kill_group(pid, number)


class _Interrupted(Exception):
    """A signal came while processes were being started."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _kill_group(process_group: int, number: int) -> None:
    try:
        os.killpg(process_group, number)
    except (ProcessLookupError, PermissionError):
        pass  # it is gone, and its number may be somebody else's by now
