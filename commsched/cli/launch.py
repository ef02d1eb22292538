"""``commsched run``: start the ranks, and on request the servers, of one job on this machine, and leave nothing behind."""

from __future__ import annotations

import errno
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ..core import timeouts
from ..core.errors import ConfigError, TransportError, ranks_text
from ..core.ports import free_port
from ..core.standard_streams import say_error
from ..net.tls import Identity
from ..session.log import NOTHING_MADE
from ..session.membership import ELASTIC
from ..settings import parse_switch
from . import launch_guard

if TYPE_CHECKING:
    from .elastic.kept import KeptServers  # which needs numpy


def run(
    ranks: int,
    servers: int,
    command: Sequence[str],
    environ: Mapping[str, str],
    elastic: Elasticity | None = None,
    *,
    own_token: bool = True,
    stdout: int | None = None,
) -> int:
    """Run ``command`` once per rank. Returns 0, or the exit code of the process that failed first, which stderr names. The code
    is 128 plus the signal's number if a signal killed that process or interrupted the job.

    ``own_token``: the job gets a token of its own, and ``environ`` has none for it.
    ``stdout`` is a descriptor to which ranks print instead of this process's stdout.
    ``environ`` is the environment of every process; the variables that make the process a part of the job are added to it.
    With ``elastic`` the job outlives the loss of processes, see ``elastic/``.

    Installs handlers that pass SIGINT, SIGTERM and SIGHUP on to every process, so it must be called from the main thread. A
    SIGINT or SIGHUP that is ignored stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _exit_by)  # so that the directory is removed, until the job has handlers of its own
    with tempfile.TemporaryDirectory(prefix="commsched-") as directory:
        among = None if elastic is None else elastic.among
        here = max(1, ranks if among is None else among.room)  # ranks on this machine
        environ = {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // here)),  # otherwise every engine takes all cores
            **{name: value for name, value in environ.items() if name != ELASTIC},  # a rank of an elastic job may call this
            "COMMSCHED_RENDEZVOUS": f"{directory}/control.json",
        }
        if elastic is not None and elastic.token_from_file is not None:
            # An elastic job starts processes at any time, and the user's file may have another token by then.
            copied = Path(directory, "token")
            copied.touch(mode=0o600)
            copied.write_text(elastic.token_from_file)
            environ["COMMSCHED_TOKEN_FILE"] = str(copied)
        if own_token:
            environ["COMMSCHED_TOKEN"] = secrets.token_hex(32)
        if among is None:  # else no address holds for the whole job
            # Variables of torchrun, for scripts that initialise torch.distributed or split their data by them.
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if elastic is not None:
            from .elastic.job import run_elastic

            return run_elastic(directory, ranks, servers, command, environ, elastic)
        told = Path(directory, "told")
        environ["COMMSCHED_LAUNCHER_FILE"] = str(told)
        job = Job(directory, told)
        try:
            disabled = parse_switch(environ.get("COMMSCHED_DISABLE", ""))
            if servers and ranks > 1 and not disabled:  # else no rank would use them
                environ["COMMSCHED_SERVERS"] = ",".join(job.start_servers(servers, environ))
            for rank in range(ranks):
                job.start_rank(command, environ, rank, ranks, stdout)
            code = job.wait()
            if code == 0 and ranks > 1 and not told.exists() and not disabled:
                tell_user(none_joined(ranks))
            return code
        except Interrupted:
            return job.exit_code()
        finally:
            job.kill()


@dataclass(frozen=True, slots=True)
class Elasticity:
    """The bounds within which an elastic job goes on. ``max_restarts``: the number of processes that may be started in place of
    lost ones. ``min_ranks``: the job ends if fewer are left. ``replace_within_seconds``: the others wait no longer for a new
    process, if they are enough. ``standby``: this machine keeps a process that has imported what the ranks import. ``among``:
    how the launchers of several machines meet; None: there is one machine. ``kept``: the servers that the user has started.
    ``token_from_file``: the token, if a file has it, which may change."""

    min_ranks: int
    max_restarts: int
    join_within_seconds: float
    replace_within_seconds: float
    standby: bool = False
    among: Among | None = None
    kept: KeptServers | None = None
    token_from_file: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Among:
    """How the launchers of an elastic job meet.

    Attributes:
        address: ``host:port`` at which one of them listens, on the machine that has this address.
        room: for so many ranks this machine has room.
        host: the address at which other machines reach this one; None: the one from which it reaches ``address``.
        fail_after_seconds: a launcher that is silent so long is lost.
    """

    address: str
    token: str
    job: str
    room: int
    host: str | None
    identity: Identity | None
    fail_after_seconds: float


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    """A process has ended, or the signal ``stopped_by`` has stopped it. It may be stopped several times."""

    process: int
    exit_code: int = 0  # negative: the number of the signal that killed it
    stopped_by: int = 0


class Ends:
    """How the processes of a job have ended. A process is known by a number, such as its pid.

    Args:
        ranks_that: returns the ranks that have reported an event: ``joined``, or ``heard`` of another's failure.
        has_heard: whether a process has reported ``heard``, if several processes have been one rank. None: ``ranks_that`` says
            so.
    """

    def __init__(self, ranks_that: Callable[[str], set[int]], has_heard: Callable[[int], bool] | None = None) -> None:
        self.names: dict[int, str] = {}
        self.ranks: dict[int, int] = {}
        self.failures: list[ProcessEvent] = []  # in the order of their ends
        self.ended_well: list[int] = []  # ranks
        self.ended_by_us: list[str] = []
        self.is_lost: set[int] = set()  # with their machine
        self._ranks_that = ranks_that
        self._has_reported = has_heard

    def _cause(self) -> ProcessEvent | None:
        """The first failure that is no consequence of another failure, and that we did not cause. A server's error exit always
        is a consequence: the server was notified of the failure."""
        for failure in self.failures:
            by_itself = self.names[failure.process] not in self.ended_by_us
            if by_itself and (failure.exit_code < 0 or not self._has_heard(failure.process)):
                return failure
        return None

    def _has_heard(self, process: int) -> bool:
        """Whether the process has ended, if with an error, as a consequence of another's."""
        if self._has_reported is not None:
            return self._has_reported(process)
        return self.ranks.get(process) in {None, *self._ranks_that("heard")}

    def what_happened(self) -> str:
        """A sentence on the process that failed first, on how it ended, and on the other processes."""
        cause = self._cause()
        ended_by_us = f"{', '.join(self.ended_by_us)} had to be ended" if self.ended_by_us else ""
        if cause is None:
            others = sum(self.names[each.process] not in self.ended_by_us for each in self.failures)
            ended = f"{others} process{'' if others == 1 else 'es'} ended with errors that name the cause" if others else ""
            absent = sorted(set(self.ended_well) - self._ranks_that("joined")) if ended else []
            left_out = f"{ranks_text(absent)} ended without an error, and without having joined" if absent else ""
            return "; ".join(filter(None, (ended_by_us, ended, left_out)))
        line = self.how(cause)
        if cause.exit_code == -signal.SIGKILL:
            line += " (out of memory?)"
        rank = self.ranks.get(cause.process)
        is_known = cause.process not in self.is_lost  # else what it had reported is lost with its machine
        if rank is not None and is_known and rank not in self._ranks_that("joined"):
            line += " before it joined the job"
        if len(self.failures) > 1:
            line += f"; then {len(self.failures) - 1} more ended with errors"
        return f"{line}; {ended_by_us}" if ended_by_us else line

    def how(self, failure: ProcessEvent) -> str:
        """Which process has failed, and how."""
        name = self.names[failure.process]
        if failure.process in self.is_lost:
            return f"{name} was lost with its launcher"
        if failure.exit_code < 0:
            return f"{name} was killed by {signal_name(-failure.exit_code)}"
        return f"{name} ended with exit code {failure.exit_code}"

    def exit_code(self) -> int:
        """The exit code of the job. A server that had to be ended, since no rank has used it, does not count."""
        counted = [
            each for each in self.failures if each.process in self.ranks or self.names[each.process] not in self.ended_by_us
        ]
        if not counted:
            return 0
        ranks_first = sorted(counted, key=lambda failure: failure.process not in self.ranks)
        code = (self._cause() or ranks_first[0]).exit_code
        return code if code >= 0 else 128 - code


#: The guard ends at once, except on a machine that is slow to run it.
_GUARD_SECONDS = 2.0


class Job:
    """The processes of one job. Each process has a session of its own, so that its children end with it. The guard process
    removes ``directory`` if this process is killed. ``told`` is the file to which the ranks append their events.

    A process that has ended is not reaped as long as its process group may get a signal. Until then the system does not reuse
    its number, which is also that of the group. So a signal to the group reaches only the processes that it has left running.
    That is until the job is over, or until :meth:`_reap`."""

    def __init__(self, directory: str, told: Path) -> None:
        self._told = told
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._alive: set[int] = set()
        self._events: SimpleQueue[Any] = SimpleQueue()  # each an ProcessEvent; in an elastic job there are others
        self._ends = Ends(self._ranks_that)
        self._names, self._ranks = self._ends.names, self._ends.ranks  # by pid
        self._timers: list[threading.Timer] = []
        self._ends_at = math.inf  # when the first of them is due
        self._interrupted = 0
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            # A parent has left it so. The system would reap processes by itself, and nobody would learn of their end.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Without site packages and environment: the guard must start at once, whatever the job's Python is like.
        self._guard = subprocess.Popen(
            [sys.executable, "-IS", launch_guard.__file__, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's &, sets it
                signal.signal(number, self._pass_on)

    def start_servers(self, count: int, environ: Mapping[str, str]) -> list[str]:
        """Start servers, side by side, and return their addresses."""
        command = [sys.executable, "-m", "commsched", "server", "--bind", "127.0.0.1:0"]
        started = [self._start(f"server {number}", command, environ, stdout=subprocess.PIPE) for number in range(count)]
        return [self._address_of(server) for server in started]

    def _address_of(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "listening on " not in line:
            self._require_not_interrupted()
            raise TransportError(f"a parameter server did not start; it said {line!r}")
        return line.rsplit(" ", 1)[1].strip()

    def start_rank(
        self, command: Sequence[str], environ: Mapping[str, str], rank: int, ranks: int, stdout: int | None = None
    ) -> int:
        """Start a process, and return its pid."""
        pid = self._start(f"rank {rank}", command, {**environ, **variables_of(rank, ranks, rank, ranks)}, stdout).pid
        self._ranks[pid] = rank
        return pid

    def _start(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        stdout: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[str]:
        self._require_not_interrupted()
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                stdout=stdout,
                text=True,
                start_new_session=True,
                pass_fds=pass_fds,
                # The new process registers itself, before it runs anything: this one might be killed before it could do that.
                preexec_fn=self._register,
            )
        except OSError as error:
            said = f"command {command[0]!r} cannot be started: {error.strerror}"
            if error.errno not in (errno.ENOEXEC, errno.ENOENT, errno.EACCES):
                raise TransportError(said) from error
            # The file itself is there, as a rule; then the program that its first line names is not.
            hint = ": its first line must be #! and the path of a program, or write the program in front of it"
            raise ConfigError(said + (hint if shutil.which(command[0]) else "")) from error
        self._processes[process.pid] = process
        self._names[process.pid] = f"{name} (pid {process.pid})"
        self._alive.add(process.pid)
        return process

    def wait(self) -> int:
        """Wait until every process has ended. The first failure, or the end of the last rank, sets a time limit for the
        others."""
        for pid in self._processes:  # these are all: no process is started after this
            threading.Thread(target=self._watch, args=(pid,), name=f"commsched-watch-{pid}", daemon=True).start()
        ranks = set(self._ranks)
        while self._alive:
            event = self._events.get()
            if event.stopped_by:
                tell_user(f"{self._names[event.process]} was stopped by {signal_name(event.stopped_by)}")
                continue
            self._alive.discard(event.process)
            ranks.discard(event.process)
            if event.exit_code != 0:
                self._ends.failures.append(event)
            elif event.process in self._ranks:
                self._ends.ended_well.append(self._ranks[event.process])
            # After a signal, the others have got it, too, and take their time.
            if (event.exit_code != 0 and not self._interrupted) or (not ranks and self._alive):
                self._end_soon()
        if self._ends.failures and not self._interrupted:
            tell_user(self._ends.what_happened())
        return self.exit_code()

    def _watch(self, pid: int) -> None:
        """Enqueue an event for the end of a process, without reaping it, and for each time it is stopped."""
        try:
            while True:
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
                if found is None or found.si_code != os.CLD_STOPPED:
                    break
                self._report(ProcessEvent(pid, stopped_by=found.si_status))
                os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG)  # otherwise the next call would return at once
        except ChildProcessError:
            return  # the job is over, and the process was reaped
        status = found.si_status if found is not None else 1
        exited = found is None or found.si_code == os.CLD_EXITED
        self._report(ProcessEvent(pid, status if exited else -status))

    def _report(self, event: ProcessEvent) -> None:
        self._events.put(event)

    def _ranks_that(self, what: str) -> set[int]:
        """The ranks that have reported the event ``what``: ``joined``, or ``heard`` of another's failure."""
        try:
            lines = self._told.read_text().splitlines()
        except FileNotFoundError:
            return set()
        return {int(line.split()[1]) for line in lines if line.startswith(f"{what} ")}

    def exit_code(self) -> int:
        return 128 + self._interrupted if self._interrupted else self._ends.exit_code()

    def _end_soon(self, number: int = 0) -> None:
        """End the processes when they have had the time that they have after the signal ``number``, or after a failure."""
        within_seconds = timeouts.SIGTERM_SECONDS if number == signal.SIGTERM else timeouts.LAUNCHER_SECONDS
        ends_at = time.monotonic() + within_seconds
        if ends_at >= self._ends_at:
            return
        self._ends_at = ends_at
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for seconds, ends_by in (
            (within_seconds, signal.SIGTERM),
            (within_seconds + launch_guard.KILL_SECONDS, signal.SIGKILL),
        ):
            timer = threading.Timer(seconds, self._end, [ends_by])
            timer.daemon = True
            timer.start()
            self._timers.append(timer)

    def _end(self, number: int) -> None:
        alive = {self._names[pid] for pid in list(self._alive)}
        self._ends.ended_by_us = sorted({*self._ends.ended_by_us, *alive})
        self._signal(number)

    def _reap(self, pid: int) -> None:
        """Reap a process that has ended, and end what it has left behind. Nothing signals its group from then on."""
        kill_group(pid, signal.SIGKILL)
        self._tell_guard(f"{launch_guard.REAPED} {pid}")
        process = self._processes.pop(pid)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def kill(self) -> None:
        """End all remaining processes at once."""
        for timer in self._timers:
            timer.cancel()
        for process_group in self._processes:
            kill_group(process_group, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._tell_guard("done")
        try:
            self._guard.wait(_GUARD_SECONDS)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._guard.kill()
            self._guard.wait()
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):
            self._guard.stdin.close()

    def _register(self) -> None:
        """Tell the guard of this process, in which nothing runs yet. If the guard was killed, this one must not end by that."""
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        self._tell_guard(os.getpid())
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)

    def _tell_guard(self, line: object) -> None:
        assert self._guard.stdin is not None
        try:
            os.write(self._guard.stdin.fileno(), f"{line}\n".encode())
        except BrokenPipeError:
            pass  # the guard was killed: as long as this process is alive, it ends the job itself

    def _require_not_interrupted(self) -> None:
        if self._interrupted:
            raise Interrupted

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        is_first, self._interrupted = not self._interrupted, self._interrupted or number
        self._signal(number)
        self._end_soon(number if is_first else 0)

    def _signal(self, number: int) -> None:
        for pid in list(self._alive):
            kill_group(pid, number)


def _exit_by(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


class Interrupted(Exception):
    """A signal came while processes were being started."""


def none_joined(ranks: int) -> str:
    return f"no rank joined the job, so nothing was averaged: each of {ranks} processes ran alone. {NOTHING_MADE}"


def variables_of(rank: int, ranks: int, local_rank: int, local_ranks: int) -> dict[str, str]:
    """The variables that tell a process its place."""
    world = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_ranks}
    return {f"{prefix}{name}": str(value) for prefix in ("COMMSCHED_", "") for name, value in world.items()}


def kill_group(process_group: int, number: int) -> None:
    try:
        os.killpg(process_group, number)
    except (ProcessLookupError, PermissionError):
        pass  # all processes of the group have ended


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def tell_user(line: str) -> None:
    say_error(f"commsched run: {line}")


def ranks_number(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"
