"""The processes of an elastic job on one machine. Whoever decides for the job, here or on another machine, gives it orders
(``control/elastic_messages.py``), and gets its reports."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, Protocol

from ...control.elastic_messages import (
    EndAll,
    Ended,
    Examine,
    KeepReady,
    KillMember,
    MachineOrder,
    MachineReport,
    MemberSaid,
    MemberStopped,
    NotStarted,
    Refused,
    Started,
    StartMember,
    Tell,
    to_line,
)
from ...control.witness import is_stopped
from ...core.errors import CommschedError, TransportError
from ...session.membership import ELASTIC, short_path
from ..launch import Interrupted, Job, ProcessEvent, kill_group, tell_user, variables_of
from . import standby

_HAS_ITS_PLACE = "another process of this rank has its place in the elastic job; commsched.init() is for that one alone"
#: A process that connects asks at once.
_ASK_SECONDS = 5.0
#: After a process could not be started, the next one is not started earlier: the system may be short of processes for a moment.
_PAUSE_SECONDS = 1.0


class Machine(Protocol):
    """A machine of the job, as who decides sees it.

    Attributes:
        host: the address at which other machines reach it.
        room: for so many ranks it has room.
    """

    host: str
    room: int

    def do(self, order: MachineOrder) -> None: ...


@dataclass(frozen=True, slots=True)
class Signalled:
    """The launcher has got a signal, which it has passed on to its processes."""

    number: int


@dataclass(frozen=True, slots=True)
class ServerEnded:
    """A server has ended, or does not serve ``generation`` any more, to which it belonged; ``why`` says which."""

    why: str
    generation: int


def _refuse(connection: socket.socket) -> None:
    """Refuse a place to a process that has got the variables of a rank, such as a child of it, when it has asked."""
    with connection, suppress(OSError), connection.makefile("rb") as file:
        connection.settimeout(_ASK_SECONDS)
        file.readline()
        connection.sendall(to_line(Refused(_HAS_ITS_PLACE)))


@dataclass(frozen=True, slots=True)
class _Unheard:
    """The process ``member`` has connected, but nobody can hear it."""

    member: int


class LocalMachine(Job):
    """This machine. Each process asks at a socket of its own, in the private ``directory`` of the job.

    Attributes:
        events: the reports of this machine, some in a form that :meth:`reported` translates.
    """

    def __init__(
        self,
        directory: str,
        ranks: int,
        room: int,
        host: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        standby: bool = False,
    ) -> None:
        super().__init__(directory, Path(directory, "told"))
        self.host = host
        self.room = room
        self._slots = room
        self.events: SimpleQueue[Any] = self._events
        self._directory = Path(directory)
        self._all_ranks = ranks
        self._command = command
        self._environ = environ
        self._members: dict[int, int] = {}  # by pid
        # Held until a start is reported, so that what the process says, and its end, is reported after it.
        self._starting = threading.Lock()
        self._pids: dict[int, int] = {}  # by member
        self._connections: dict[int, socket.socket] = {}  # by member
        self._listening: dict[int, socket.socket] = {}  # by member
        self._has_started = False  # a rank was started here
        self._is_to_end = False  # by a signal to another launcher
        self._servers: dict[int, int] = {}  # by pid, the generation; those of the last one
        self._keeps_standby = standby
        self._standby: tuple[int, int] | None = None  # the pid of a process that waits to be a rank, and a pipe to it

    @property
    def is_empty(self) -> bool:
        """Whether no process of it lives."""
        return not self._alive - ({self._standby[0]} if self._standby is not None else set())

    @property
    def interrupted_by(self) -> int:
        """The number of the signal that this launcher has got; 0: none."""
        return self._interrupted

    def do(self, order: MachineOrder) -> None:
        match order:
            case StartMember(member, rank, slot):
                self._start_member(member, rank, slot)
            case KillMember(member) if member in self._pids:
                kill_group(self._pids[member], signal.SIGKILL)
            case Examine(member) if member in self._pids:
                if self._pids[member] in self._alive and is_stopped(self._pids[member]):
                    self.events.put(MemberStopped(member, 0))
            case Tell(member, line):
                with suppress(OSError, KeyError):  # it was killed meanwhile, and its end is to come
                    self._connections[member].sendall(line.encode())
            case KeepReady() if self._keeps_standby and self._standby is None:
                self._prepare()
            case EndAll(number):
                if number:
                    self._signal(number)
                # The launcher that sends it sends one for each signal that it gets.
                self._end_soon(0 if self._is_to_end else number)
                self._is_to_end = self._is_to_end or number > 0

    def reported(self, event: Any) -> MachineReport | Signalled | ServerEnded | None:
        """The report that ``event`` stands for, if any. Call it for all that ``events`` yields, in the thread that calls
        :meth:`do`."""
        if not isinstance(event, ProcessEvent):
            if isinstance(event, _Unheard):
                self.do(KillMember(event.member))
                return None
            assert isinstance(event, MachineReport | Signalled | ServerEnded)
            return event
        pid = event.process
        member = self._members.get(pid)
        if self._standby is not None and event.process == self._standby[0] and not event.stopped_by:
            self._release_standby()
        if event.stopped_by:
            return None if member is None else MemberStopped(member, event.stopped_by)
        self._alive.discard(pid)
        generation = self._servers.pop(pid, None)
        self._members.pop(pid, None)
        if event.exit_code != 0:  # else what it has left running may run until the job is over
            self._reap(pid)
        if member is None:  # else it is a process that has waited to be a rank, or a server of an earlier generation
            return None if generation is None else ServerEnded(f"{self._names[pid]} has ended", generation)
        del self._pids[member]
        told = self._told_by(member)
        self._release(member)
        was_ended = self._names[pid] in self._ends.ended_by_us
        return Ended(member, event.exit_code, told, was_ended)

    def serve(self, count: int, generation: int) -> list[str]:
        """End the servers of the last generation, and start ``count`` for ``generation``. Return their addresses."""
        for pid in self._servers:
            kill_group(pid, signal.SIGKILL)
        before = set(self._processes)
        addresses = self.start_servers(count, self._environ)
        self._servers = dict.fromkeys(set(self._processes) - before, generation)
        try:
            for pid in self._servers:
                self._watch_in_thread(pid)
        except RuntimeError as error:  # the system gives no further thread
            raise TransportError(f"the end of a server could not be noticed: {error}") from error
        return addresses

    def close(self) -> None:
        """End all remaining processes at once, and release everything."""
        self.kill()
        for member in tuple(self._listening):
            self._release(member)

    def _release(self, member: int) -> None:
        """Release what belongs to a process that has ended."""
        for held in (self._listening.pop(member), self._connections.pop(member, None)):
            if held is not None:
                with suppress(OSError):
                    held.shutdown(socket.SHUT_RDWR)  # wakes the thread of the member, also if a child holds the other end
                held.close()
        for name in (self._socket_path(member), self._told_path(member)):
            name.unlink(missing_ok=True)

    def _socket_path(self, member: int) -> Path:
        return self._directory / f"member-{member}"

    def _told_path(self, member: int) -> Path:
        return self._directory / f"told-{member}"

    def _start_member(self, member: int, rank: int, slot: int) -> None:
        path, told = self._socket_path(member), self._told_path(member)
        self._listening[member] = listening = socket.socket(socket.AF_UNIX)
        with short_path(path) as short:
            listening.bind(short)
        listening.listen()
        own = {
            **variables_of(rank, self._all_ranks, slot, self._slots),
            ELASTIC: str(path),
            "COMMSCHED_LAUNCHER_FILE": str(told),
        }
        listener = threading.Thread(
            target=self._listen, args=(member, listening), name=f"commsched-member-{member}", daemon=True
        )
        try:
            listener.start()
            with self._starting:
                pid = self._standby_as(own)
                if pid is None:
                    pid = self._start_watched(f"rank {rank}", self._command, {**self._environ, **own})
                self._members[pid], self._pids[member] = member, pid
                self.events.put(Started(member, pid))
        except Interrupted:
            self._release(member)
            self.events.put(NotStarted(member))
        except (CommschedError, RuntimeError) as error:  # RuntimeError: the system gives no further thread
            self._release(member)
            if not self._has_started:
                raise
            tell_user(f"rank {rank}: {error}")
            time.sleep(_PAUSE_SECONDS)
            self.events.put(Ended(member, 1, (), False))  # as if the rank had failed: a restart, or one rank fewer
        else:
            self._has_started = True

    def _report(self, event: ProcessEvent) -> None:
        with self._starting:
            super()._report(event)

    def _prepare(self) -> None:
        """Start a process that imports what the ranks import, and then waits to be one. If that fails, there will be none."""
        reading, writing = os.pipe()
        python, *script = self._command
        try:
            command = [python, standby.__file__, str(reading), *script]
            pid = self._start_watched("the process on standby", command, self._environ, pass_fds=[reading])
        except Interrupted:
            os.close(writing)
            return
        except (CommschedError, RuntimeError) as error:
            os.close(writing)
            self._keeps_standby = False
            tell_user(f"there is no process on standby any more: {error}")
            return
        finally:
            os.close(reading)
        self._standby = pid, writing

    def _standby_as(self, environ: Mapping[str, str]) -> int | None:
        """Let the process on standby run, with ``environ``, and return its pid. None: there is none."""
        if self._standby is None or self._interrupted:
            return None
        pid, writing = self._standby
        try:
            os.write(writing, f"{json.dumps(dict(environ))}\n".encode())
        except BrokenPipeError:
            return None  # it has just ended
        finally:
            self._release_standby()
        return pid

    def _release_standby(self) -> None:
        assert self._standby is not None
        os.close(self._standby[1])
        self._standby = None

    def _start_watched(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> int:
        """Start a process whose end is reported, and return its pid. Raises RuntimeError, and leaves no process, if the system
        gives no thread for that."""
        pid = self._start(name, command, environ, pass_fds=pass_fds).pid
        try:
            self._watch_in_thread(pid)
        except RuntimeError:
            self._alive.discard(pid)
            self._reap(pid)
            raise
        return pid

    def _watch_in_thread(self, pid: int) -> None:
        threading.Thread(target=self._watch, args=(pid,), name=f"commsched-watch-{pid}", daemon=True).start()

    def _listen(self, member: int, listening: socket.socket) -> None:
        """Hear the process ``member``, and meanwhile refuse others, such as its children, which have got its variables."""
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return  # the process has ended
            before = self._connections.get(member)
            if before is not None and before.fileno() >= 0:
                _refuse(connection)
                continue
            self._connections[member] = connection
            name = f"commsched-member-{member}-says"
            try:
                threading.Thread(target=self._hear, args=(member, connection), name=name, daemon=True).start()
            except RuntimeError as error:  # the system gives no further thread
                tell_user(f"a rank cannot be heard, and is killed: {error}")
                connection.close()
                with self._starting:
                    self.events.put(_Unheard(member))

    def _hear(self, member: int, connection: socket.socket) -> None:
        with connection, suppress(OSError, UnicodeDecodeError), connection.makefile("rb") as file:
            for line in file:
                said = MemberSaid(member, line.decode())
                with self._starting:
                    self.events.put(said)

    def _told_by(self, member: int) -> tuple[str, ...]:
        """The events that the process has reported."""
        try:
            lines = self._told_path(member).read_text().splitlines()
        except FileNotFoundError:
            return ()
        return tuple(line.split()[0] for line in lines if line)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        super()._pass_on(number, frame)
        self.events.put(Signalled(number))
