"""``commsched run --elastic``: a job that outlives the loss of ranks and servers.

The launcher decides who is in each generation (``control/generations.py``). Each process asks it at a socket of its own, in the
job's private directory.
"""

from __future__ import annotations

import secrets
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

from ..control.generations import (
    Action,
    Asked,
    Dismiss,
    Finish,
    Form,
    Generations,
    GiveUp,
    Kill,
    Place,
    Start,
    Summon,
    Summoned,
    answer_to_line,
    asked_from_line,
)
from ..control.witness import runs
from ..session.membership import ELASTIC, short_path
from .launch import Elasticity, _Event, _Interrupted, _Job, _kill_group, _say, _signal_name

_TICK_SECONDS = 0.5
_ASK_SECONDS = 5.0  # a survivor that has not asked so long after the first, and does not run, is taken for lost


@dataclass(frozen=True, slots=True)
class _AskedEvent:
    member: int
    asked: Asked
    connection: socket.socket


class ElasticJob(_Job):
    """The processes of one elastic job. Servers are started anew for each generation, since they serve one session."""

    def __init__(
        self,
        directory: str,
        told: Path,
        servers: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        elasticity: Elasticity,
    ) -> None:
        super().__init__(directory, told)
        self._directory = Path(directory)
        self._servers = servers
        self._command = command
        self._environ = environ
        self._generations = Generations(
            elasticity.min_ranks,
            elasticity.max_restarts,
            elasticity.join_within_seconds,
            elasticity.replace_within_seconds,
        )
        self._members: dict[int, int] = {}  # by pid
        self._pids: dict[int, int] = {}  # by member
        self._connections: dict[int, socket.socket] = {}  # by member
        self._waiting: set[int] = set()  # members that wait for an answer
        self._server_pids: set[int] = set()
        self._killed: set[int] = set()  # pids
        self._listening: list[socket.socket] = []
        self._ranks_now = 0
        self._losses: list[_Event] = []  # since the last generation began
        self._awaited: set[int] = set()  # members that were said to be awaited, since then

    def run(self, ranks: int) -> int:
        """Run the job from its start to its end, and return the exit code."""
        self._ranks_now = ranks
        try:
            for rank in range(ranks):
                self._start_member(rank)
            return self.wait()
        except _Interrupted:
            return self.exit_code()
        finally:
            self.kill()
            for listening in self._listening:
                with suppress(OSError):
                    listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
                listening.close()

    def _start_member(self, rank: int) -> None:
        member = len(self._members)
        path = self._directory / f"member-{member}"
        told = self._directory / f"told-{member}"
        listening = socket.socket(socket.AF_UNIX)
        self._listening.append(listening)
        with short_path(path) as short:
            listening.bind(short)
        listening.listen()
        threading.Thread(target=self._listen, args=(member, listening), name=f"commsched-member-{member}", daemon=True).start()
        self._generations.started(member, rank, time.monotonic())
        environ = {**self._environ, ELASTIC: str(path), "COMMSCHED_LAUNCHER_FILE": str(told)}
        pid = self.start_rank(self._command, environ, rank, self._ranks_now)
        self._members[pid], self._pids[member] = member, pid
        self._watch_in_thread(pid)

    def _watch_in_thread(self, pid: int) -> None:
        threading.Thread(target=self._watch, args=(pid,), name=f"commsched-watch-{pid}", daemon=True).start()

    def _listen(self, member: int, listening: socket.socket) -> None:
        """Enqueue what the process ``member`` asks."""
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return  # the job is over
            # It may be killed while it writes.
            with suppress(OSError, ValueError, TypeError), connection.makefile("rb") as file:
                for line in file:
                    self._events.put(_AskedEvent(member, asked_from_line(line), connection))

    def wait(self) -> int:
        """Wait until every rank has ended for good."""
        while self._alive & set(self._ranks):
            try:
                event = self._events.get(timeout=_TICK_SECONDS)
            except Empty:
                self._tick()
                continue
            if isinstance(event, _AskedEvent):
                self._was_asked(event)
            elif event.stopped_by:
                _say(f"{self._names[event.pid]} was stopped by {_signal_name(event.stopped_by)}")
            else:
                self._ended(event)
        if self._failures and not self._interrupted:
            _say(self._what_happened())
        return self.exit_code() or int(self._generations.is_closed)

    def _was_asked(self, event: _AskedEvent) -> None:
        self._connections[event.member] = event.connection
        self._waiting.add(event.member)
        if self._interrupted:  # all ranks have got the signal, and leave
            gone = event.asked.leaves or event.asked.is_done
            self._answer(event.member, Finish() if gone else GiveUp("commsched run was interrupted"))
            return
        if event.asked.leaves:
            _say(f"{self._names[self._pids[event.member]]} leaves")
        self._do(self._generations.asked(event.member, event.asked, time.monotonic()))

    def _tick(self) -> None:
        now = time.monotonic()
        self._do(self._generations.tick(now))
        for member in self._generations.awaited(now, _ASK_SECONDS):
            pid = self._pids[member]
            if pid not in self._killed and not runs(pid):
                self._do([Kill(member, "it was stopped")])
            elif member not in self._awaited:
                self._awaited.add(member)
                _say(f"all wait for {self._names[pid]}, which has not noticed the loss yet")

    def _ended(self, event: _Event) -> None:
        self._alive.discard(event.pid)
        if event.pid in self._server_pids:
            return  # ranks that miss it ask for another generation
        if event.exit_code != 0:
            _kill_group(event.pid, signal.SIGKILL)  # what the process has left behind, such as a data loader's processes
        if self._interrupted:
            self._failures += [event] if event.exit_code else []
            return
        member = self._members[event.pid]
        self._waiting.discard(member)
        if (connection := self._connections.pop(member, None)) is not None:
            connection.close()
        if event.exit_code != 0:
            (self._failures if self._generations.is_closed else self._losses).append(event)
        actions = self._generations.ended(member, event.exit_code == 0, self._has_heard(event.pid))
        if event.exit_code != 0 and event.pid not in self._killed and not self._generations.is_closed:
            _say(f"{self._names[event.pid]} {_ended_how(event)}")
        self._do(actions)

    def _told_by(self, pid: int) -> set[str]:
        """The events that the process has reported."""
        try:
            lines = Path(self._directory, f"told-{self._members[pid]}").read_text().splitlines()
        except FileNotFoundError:
            return set()
        return {line.split()[0] for line in lines}

    def _ranks_that(self, what: str) -> set[int]:
        return {rank for pid, rank in self._ranks.items() if what in self._told_by(pid)}

    def _has_heard(self, pid: int) -> bool:
        return pid not in self._members or "heard" in self._told_by(pid)

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(rank):
                    _say(f"rank {rank} is replaced; restarts left: {self._generations.restarts_left}")
                    self._start_member(rank)
                case Kill(member, why):
                    pid = self._pids[member]
                    _say(f"{self._names[pid]} is killed: {why}")
                    self._killed.add(pid)
                    _kill_group(pid, signal.SIGKILL)
                case Summon(member):
                    self._tell(member, Summoned())
                case Form():
                    self._form(action)
                case Dismiss(member):
                    self._answer(member, Finish())
                case GiveUp(why):
                    if not self._timers:
                        _say(f"the job cannot go on: {why}")
                    self._failures, self._losses = [*self._losses, *self._failures], []
                    for waiting in tuple(self._waiting):
                        self._answer(waiting, action)
                    self._end_soon()

    def _form(self, form: Form) -> None:
        for pid in self._server_pids:
            _kill_group(pid, signal.SIGKILL)
        token = secrets.token_hex(32)
        rendezvous = str(self._directory / f"control-{form.generation}.json")
        before = set(self._processes)
        addresses = self.start_servers(self._servers, {**self._environ, "COMMSCHED_TOKEN": token})
        for pid in set(self._processes) - before:
            self._server_pids.add(pid)
            self._watch_in_thread(pid)
        size = len(form.ranks)
        if form.generation > 1:
            fewer = f" instead of {self._ranks_now}" if size != self._ranks_now else ""
            _say(f"the job goes on with {size} rank{'s' if size > 1 else ''}{fewer}, from step {form.steps}")
        self._ranks_now = size
        self._losses.clear()
        self._awaited.clear()
        for member, rank in form.ranks.items():
            pid = self._pids[member]
            self._ranks[pid], self._names[pid] = rank, f"rank {rank} (pid {pid})"
            place = Place(form.generation, rank, size, form.root, form.steps, token, rendezvous, tuple(addresses))
            self._answer(member, place)

    def _answer(self, member: int, answer: Place | Finish | GiveUp) -> None:
        self._waiting.remove(member)
        self._tell(member, answer)

    def _tell(self, member: int, answer: Place | Finish | GiveUp | Summoned) -> None:
        with suppress(OSError):  # it was killed meanwhile, and its end is to come
            self._connections[member].sendall(answer_to_line(answer))


def _ended_how(event: _Event) -> str:
    if event.exit_code < 0:
        return f"was killed by {_signal_name(-event.exit_code)}"
    return f"ended with exit code {event.exit_code}"
