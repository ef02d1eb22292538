"""``commsched run --elastic``: a job that outlives the loss of ranks, servers and machines.

One launcher hosts the job: it decides who is in each generation (``control/generations.py``). It starts processes on its own
machine, and has those of other machines started by their launchers (``links.py``), which follow it (``follow.py``).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from queue import Empty
from typing import Any

from ...control.elastic_messages import (
    Closes,
    EndAll,
    Ended,
    Examine,
    Finish,
    HostAnswer,
    KeepReady,
    KillMember,
    Listens,
    MachineReport,
    MemberSaid,
    MemberStopped,
    NotStarted,
    Over,
    Place,
    RankEnded,
    Started,
    StartMember,
    Summoned,
    Tell,
    from_line,
    to_line,
)
from ...control.generations import Action, Asked, Dismiss, Form, Generations, GiveUp, Kill, Start, Summon
from ...control.rendezvous import fitting_name, require_no_loopback
from ...core.errors import TransportError, ranks_text
from ...settings import parse_switch
from ..launch import Elasticity, Ends, Interrupted, ProcessEvent, none_joined, ranks_number, signal_name, tell_user
from . import links
from .follow import follow
from .machine import LocalMachine, Machine, ServerEnded, Signalled

_TICK_SECONDS = 0.5
#: A survivor that has not asked so long after the first, and does not run, is taken for lost. A member that was dismissed, and
#: does not run so long after, will not end by itself.
_ASK_SECONDS = 5.0

#: Why those that ask get no place after a signal to this launcher. They have got it too, and leave.
_INTERRUPTED = "commsched run was interrupted"


def run_elastic(
    directory: str,
    ranks: int,
    servers: int,
    command: Sequence[str],
    environ: Mapping[str, str],
    elasticity: Elasticity,
) -> int:
    """Run the processes of an elastic job on this machine, and decide for the job if no other launcher does. Returns the exit
    code of the job.

    Raises:
        ConfigError: the launchers of several machines do not meet.
    """
    among = elasticity.among
    room = ranks if among is None else min(ranks, among.room)
    with ExitStack() as stack:
        listening = None if among is None else links.listen_for_launchers(among)
        own_host = "127.0.0.1" if elasticity.kept is None else elasticity.kept.host
        if among is not None and listening is not None:
            stack.callback(listening.close)
            require_no_loopback(among.address.rpartition(":")[0].strip("[]"), f"control={among.address!r}")
            own_host = among.host or str(listening.getsockname()[0])
        machine = LocalMachine(directory, ranks, room, own_host, command, environ, standby=elasticity.standby)
        stack.callback(machine.close)
        if among is not None and listening is None:
            return follow(machine, among, _common(ranks, elasticity), elasticity.join_within_seconds)
        desk = None
        if among is not None and listening is not None:
            desk = links.Desk(listening, among, machine.events)
            stack.callback(desk.close)
        disabled = parse_switch(environ.get("COMMSCHED_DISABLE", ""))
        job = _ElasticJob(machine, ranks, servers, elasticity)
        code = job.run()
        if code == 0 and ranks > 1 and not job.has_begun and not disabled:
            tell_user(none_joined(ranks))
        return code


def _common(ranks: int, elasticity: Elasticity) -> dict[str, Any]:
    """The settings that all launchers of a job must share, by their options."""
    return {
        "-n": ranks,
        "--min": elasticity.min_ranks,
        "--max-restarts": elasticity.max_restarts,
        "--replace-within": elasticity.replace_within_seconds,
        "servers": "none" if elasticity.kept is None else ",".join(elasticity.kept.addresses),
    }


class _Member:
    """A process of the job: the ``slot`` of the ``machine`` where it is."""

    def __init__(self, machine: Machine, slot: int) -> None:
        self.machine = machine
        self.slot: int | None = slot  # None as soon as another process may take its place
        self.has_started = False
        self.lives = True


class _ElasticJob:
    """The host's view of the job. Servers of ``--servers`` are started anew for each generation, since they serve one session.
    Those that the user has started are reserved for it."""

    def __init__(self, here: LocalMachine, ranks: int, servers: int, elasticity: Elasticity) -> None:
        self._here = here
        self._ranks = ranks
        self._servers = servers
        self._kept = elasticity.kept
        self._name = "" if elasticity.among is None else elasticity.among.job
        self._settings = _common(ranks, elasticity)
        self._spans_machines = elasticity.among is not None
        self._generations = Generations(
            elasticity.min_ranks,
            elasticity.max_restarts,
            elasticity.join_within_seconds,
            elasticity.replace_within_seconds,
        )
        self._machines: list[Machine] = [here]
        self._members: dict[int, _Member] = {}
        self._next_member = 0
        self._homeless: list[int] = []  # members for which no machine has room yet
        self._told: dict[int, tuple[str, ...]] = {}  # by member that has ended, the events that it had reported
        self._ends = Ends(self._ranks_that, lambda number: "heard" in self._told.get(number, ()))
        self._waiting: set[int] = set()  # members that wait for an answer
        self._killed: set[int] = set()
        self._dismissed: dict[int, float] = {}  # members that are to end, and since when
        self._left: set[int] = set()  # members that have left, which is no failure
        self._ranks_now = ranks
        self._losses: list[ProcessEvent] = []  # since the last generation began
        self._awaited: set[int] = set()  # members that were said to be awaited, since then
        self._missed: set[int] = set()  # members that others have lost, since then
        self._generation: Form | None = None
        self._has_told_of_loss = False  # in this generation
        self._has_given_up = False

    @property
    def has_begun(self) -> bool:
        """Whether there was a generation."""
        return self._generation is not None

    def run(self) -> int:
        """Run the job from its start to its end, and return the exit code."""
        if self._here.room < self._ranks:
            tell_user(f"{self._here.host} hosts the job, with room for {self._here.room} of {self._ranks} ranks")
        for rank in range(self._ranks):
            self._want(rank)
        self._wait()
        self._refuse_the_last()
        number = self._here.interrupted_by
        sentence = self._ends.what_happened() if self._ends.failures and not number else ""
        if sentence or number:
            tell_user(sentence or self._after_signal(number))
        code = 128 + number if number else self._ends.exit_code() or int(self._generations.is_closed)
        for machine in self._machines:
            if isinstance(machine, links.RemoteMachine):
                machine.link.send(Over(code, sentence))
        return code

    def _after_signal(self, number: int) -> str:
        """A sentence on the signal that this launcher has got and passed on, and on how the processes have ended."""
        failures = self._ends.failures
        forced = [each for each in failures if self._ends.names[each.process] in self._ends.ended_by_us]
        killed = [each for each in failures if each.exit_code == -number and each not in forced]
        heard = [each for each in failures if each.exit_code > 0 and "heard" in self._told.get(each.process, ())]
        ends = [
            self._ranks_and(self._ends.ended_well, "ended without an error"),
            self._ranks_and([self._ends.ranks[each.process] for each in killed], "ended by it"),
            *(self._ends.how(each) for each in failures if each not in (*forced, *killed, *heard)),
            self._ranks_and([self._ends.ranks[each.process] for each in forced], "had to be ended"),
            self._ranks_and([self._ends.ranks[each.process] for each in heard], "ended with an error, since others had left"),
        ]
        return f"{signal_name(number)} has ended the job: {'; '.join(filter(None, ends)) or 'no rank had started'}"

    @staticmethod
    def _ranks_and(ranks: Sequence[int], what: str) -> str:
        return f"{ranks_text(sorted(set(ranks)))} {what}" if ranks else ""

    def _wait(self) -> None:
        """Wait until every process has ended for good."""
        next_tick = time.monotonic() + _TICK_SECONDS
        while self._homeless or any(member.lives for member in self._members.values()):
            self._settle()
            if (left := next_tick - time.monotonic()) <= 0:
                self._tick()
                next_tick = time.monotonic() + _TICK_SECONDS
                continue
            try:
                event = self._here.events.get(timeout=left)
            except Empty:
                continue
            match event:
                case links.Came(machine):
                    self._came(machine)
                case links.Heard(machine, report):
                    if machine in self._machines:
                        self._reported(machine, report)
                case links.Gone(machine, why):
                    if machine in self._machines:
                        self._gone(machine, why)
                case _:
                    own = self._here.reported(event)
                    if isinstance(own, Signalled):
                        self._homeless.clear()
                        self._order_all(EndAll(own.number))
                        for waiting in tuple(self._waiting):  # nobody else would answer them, and they could not leave
                            self._answer(waiting, GiveUp(_INTERRUPTED))
                    elif isinstance(own, ServerEnded):
                        self._tell_of_loss(own.generation, own.why)
                    elif own is not None:
                        self._reported(self._here, own)

    def _refuse_the_last(self) -> None:
        """Answer the launchers that have come since the last process ended."""
        with suppress(Empty):
            while True:
                if isinstance(event := self._here.events.get_nowait(), links.Came):
                    self._refuse(event.machine, "the job has ended")

    def _order_all(self, order: EndAll) -> None:
        for machine in self._machines:
            if machine is not self._here:
                machine.do(order)

    # --- machines ---

    def _came(self, machine: links.RemoteMachine) -> None:
        problem = next(
            (
                f"{name} is {machine.settings.get(name)} there, and {value} at {self._here.host}; give all launchers the same"
                for name, value in self._settings.items()
                if machine.settings.get(name) != value
            ),
            "",
        )
        if self._here.interrupted_by or self._generations.is_closed:
            problem = problem or "the job ends"
        if problem:
            return self._refuse(machine, problem)
        machine.link.send(HostAnswer(""))
        self._machines.append(machine)
        tell_user(f"{machine.host} has come, with room for {ranks_number(machine.room)}")

    def _refuse(self, machine: links.RemoteMachine, problem: str) -> None:
        tell_user(f"the launcher at {machine.host} is refused: {problem}")
        machine.link.send(HostAnswer(problem))
        machine.link.finish()

    def _gone(self, machine: links.RemoteMachine, why: str) -> None:
        self._machines.remove(machine)
        for number in [each for each, its in self._members.items() if its.machine is machine and not its.has_started]:
            self._not_started(number)
        living = [number for number, member in self._members.items() if member.machine is machine and member.lives]
        lost = [number for number in living if self._generations.includes(number)]  # the others have left, and were ending
        if lost and not self._here.interrupted_by:
            ranks = ranks_text(sorted(self._ends.ranks[member] for member in lost))
            tell_user(f"the launcher at {machine.host} is lost ({why}), and with it {ranks}")
        # Its processes may live without their launcher. The others must not go on with them.
        if any(self._generations.has_place(number) for number in lost):
            for number, member in self._members.items():
                if member.lives and number not in living and number not in self._waiting:
                    self._tell(number, Summoned())
        self._ends.is_lost.update(lost)
        self._killed.update(living)  # so nothing more is said of them
        self._generations.silent(lost)
        for number in living:
            self._ended(Ended(number, int(number in lost)))

    def _want(self, rank: int) -> None:
        """Have a process started as ``rank``, as soon as a machine has room."""
        self._generations.wanted(self._next_member, rank, time.monotonic())
        self._homeless.append(self._next_member)
        self._next_member += 1

    def _settle(self) -> None:
        """Start the processes for which there is room."""
        while self._homeless and (found := self._room()) is not None:
            machine, slot = found
            number = self._homeless.pop(0)
            rank = self._generations.started(number, time.monotonic())
            self._members[number] = _Member(machine, slot)
            self._ends.ranks[number], self._ends.names[number] = rank, f"rank {rank}"
            machine.do(StartMember(number, rank, slot))

    def _room(self) -> tuple[Machine, int] | None:
        for machine in self._machines:
            taken = {member.slot for member in self._members.values() if member.machine is machine}
            for slot in range(machine.room):
                if slot not in taken:
                    return machine, slot
        return None

    # --- processes ---

    def _reported(self, machine: Machine, report: MachineReport) -> None:
        if isinstance(report, Closes):
            machine.room = 0
            tell_user(f"the launcher at {machine.host} has got a signal: its ranks leave, and no further ones start there")
            for number in [each for each in self._waiting if self._members[each].machine is machine]:
                self._release(number)
            return
        member = self._members.get(report.member)
        if member is None or member.machine is not machine or not member.lives:
            return
        match report:
            case MemberSaid(number, line):
                self._said(number, line)
            case Ended():
                self._ended(report)
            case NotStarted(number):
                self._not_started(number)
            case Started(number, pid):
                member.has_started = True
                at = f" at {machine.host}" if self._spans_machines else ""
                self._ends.names[number] = f"rank {self._ends.ranks[number]} (pid {pid}{at})"
            case MemberStopped(number, 0):
                if number not in self._killed:
                    self._do([Kill(number, "it was stopped")])
            case MemberStopped(number, signal_number):
                tell_user(f"{self._ends.names[number]} was stopped by {signal_name(signal_number)}")

    def _not_started(self, number: int) -> None:
        """A process was ordered from a launcher that has got a signal, or was lost, meanwhile. Another one may start it."""
        del self._members[number]
        if self._generations.includes(number) and not self._generations.is_closed and not self._here.interrupted_by:
            self._generations.not_started(number, time.monotonic())
            self._homeless.append(number)

    def _said(self, number: int, line: str) -> None:
        try:
            said = from_line(line)
        except ValueError:
            return  # it was killed while it wrote
        if isinstance(said, Asked):
            self._asked(number, said)
        elif isinstance(said, Listens) and self._generation is not None:
            is_rank_0 = self._generation.ranks.get(number) == 0
            if is_rank_0 and said.generation == self._generation.generation:
                self._meet_at(said.address)

    def _meet_at(self, address: str) -> None:
        """Tell the ranks of this generation where rank 0 listens."""
        assert self._generation is not None
        for number, rank in self._generation.ranks.items():
            if rank != 0 and self._members[number].lives:
                self._tell(number, Listens(self._generation.generation, address))

    def _tell_of_loss(self, generation: int, why: str, member: int | None = None) -> None:
        """Tell the ranks of ``generation`` that it cannot open any more, if it has not opened yet."""
        if self._generation is None or generation != self._generation.generation or self._has_told_of_loss:
            return
        self._has_told_of_loss = True
        rank = None if member is None else self._generation.ranks[member]
        for number in self._generation.ranks:
            if self._members[number].lives and number not in self._waiting:
                self._tell(number, RankEnded(generation, why, rank))

    def _release(self, number: int) -> None:
        """Let a member leave that waits for its next place, and so cannot ask to."""
        self._note_that_leaves(number)
        self._dismissed[number] = time.monotonic()
        self._answer(number, GiveUp(_INTERRUPTED))
        actions = self._generations.asked(number, Asked(leaves=True), time.monotonic())
        self._do([action for action in actions if action != Dismiss(number)])

    def _note_that_leaves(self, number: int) -> None:
        tell_user(f"{self._ends.names[number]} leaves")
        self._members[number].slot = None
        self._left.add(number)

    def _asked(self, number: int, asked: Asked) -> None:
        self._waiting.add(number)
        if self._here.interrupted_by:  # all ranks have got the signal, and leave
            gone = asked.leaves or asked.is_done
            self._answer(number, Finish() if gone else GiveUp(_INTERRUPTED))
            return
        if asked.leaves:
            self._note_that_leaves(number)
        if self._generation is not None and number in self._generation.ranks and not asked.is_done:
            self._tell_of_loss(self._generation.generation, f"{self._ends.names[number]} has lost others", number)
        if asked.lost is not None and self._generation is not None:
            self._missed |= {each for each, rank in self._generation.ranks.items() if rank == asked.lost}
        self._do(self._generations.asked(number, asked, time.monotonic()))

    def _tick(self) -> None:
        if self._here.interrupted_by:  # there is no further generation
            return
        now = time.monotonic()
        self._do(self._generations.tick(now))
        awaited = self._generations.awaited(now, _ASK_SECONDS)
        for number in (*awaited, *(each for each, since in self._dismissed.items() if now > since + _ASK_SECONDS)):
            if number not in self._killed:
                self._members[number].machine.do(Examine(number))
            if number in self._dismissed:
                self._dismissed[number] = now  # it is examined again after as long
        for number in awaited:
            if number not in self._awaited:
                self._awaited.add(number)
                tell_user(f"all wait for {self._ends.names[number]}, which has not noticed the loss yet")

    def _ended(self, ended: Ended) -> None:
        number, well = ended.member, ended.exit_code == 0
        member, name = self._members[number], self._ends.names[number]
        member.lives, member.slot = False, None
        self._waiting.discard(number)
        self._dismissed.pop(number, None)
        self._told[number] = ended.told
        if ended.was_ended:
            self._ends.ended_by_us = sorted([*self._ends.ended_by_us, name])
        failure = ProcessEvent(number, ended.exit_code)
        if self._here.interrupted_by:
            if well:
                self._ends.ended_well.append(self._ends.ranks[number])
            else:
                self._ends.failures.append(failure)
            return
        is_closed = self._generations.is_closed
        if well:
            self._ends.ended_well.append(self._ends.ranks[number])
        elif not {number} <= self._left & self._killed:  # that one was stopped in its end, and others need nothing of it
            (self._ends.failures if is_closed else self._losses).append(failure)
        if self._generation is not None and number in self._generation.ranks:
            self._tell_of_loss(self._generation.generation, f"{name} has ended", number)
        actions = self._generations.ended(number, well, "heard" in ended.told)
        if not well and number not in self._killed and not is_closed:
            tell_user(self._ends.how(failure))
        self._do(actions)

    def _ranks_that(self, what: str) -> set[int]:
        return {self._ends.ranks[number] for number, told in self._told.items() if what in told}

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(rank):
                    self._want(rank)
                    self._settle()
                    wait = ", as soon as a machine has room for it" if self._homeless else ""
                    tell_user(f"rank {rank} is replaced{wait}; restarts left: {self._generations.restarts_left}")
                case Kill(number, why):
                    if number in self._homeless:
                        self._homeless.remove(number)
                        continue
                    tell_user(f"{self._ends.names[number]} is killed: {why}")
                    self._killed.add(number)
                    self._members[number].machine.do(KillMember(number))
                case Summon(number):
                    self._tell(number, Summoned())
                case Form():
                    self._form(action)
                case Dismiss(number):
                    self._dismissed[number] = time.monotonic()
                    self._answer(number, Finish())
                case GiveUp(why):
                    if not self._has_given_up:
                        tell_user(f"the job cannot go on: {why}")
                    self._has_given_up = True
                    self._ends.failures, self._losses = [*self._losses, *self._ends.failures], []
                    self._homeless.clear()
                    for waiting in tuple(self._waiting):
                        self._answer(waiting, action)
                    for machine in self._machines:
                        machine.do(EndAll(0))

    def _form(self, form: Form) -> None:
        self._generation, self._has_told_of_loss = form, False
        size = len(form.ranks)
        job = fitting_name(f"{self._name} generation {form.generation} {secrets.token_hex(16)}".lstrip())

        def ended(address: str) -> None:
            self._here.events.put(ServerEnded(f"the server at {address} serves it no more", form.generation))

        try:
            servers = self._here.serve(self._servers, form.generation)
            if self._kept is not None and size > 1:
                servers = self._kept.reserve(job, lambda: self._here.interrupted_by > 0, ended)
        except Interrupted:
            return  # the event of that signal comes next
        except TransportError as error:
            return self._do(self._generations.give_up(str(error)))
        if form.is_again:
            missed = ", ".join(sorted(self._ends.names[number] for number in self._missed))
            what = f"the connection to {missed}" if missed else "a connection or a server"
            tell_user(f"{what} was lost, and no rank had failed; restarts left: {self._generations.restarts_left}")
        if form.generation > 1:
            fewer = f" instead of {self._ranks_now}" if size != self._ranks_now else ""
            tell_user(f"the job goes on with {ranks_number(size)}{fewer}, from step {form.steps}")
        self._ranks_now = size
        self._losses.clear()
        self._awaited.clear()
        self._missed.clear()
        place = Place(form.generation, 0, size, 0, 0, form.root, form.steps, "", job, tuple(servers))
        for number, rank in form.ranks.items():
            _, bracket, rest = self._ends.names[number].partition(" (")
            self._ends.ranks[number], self._ends.names[number] = rank, f"rank {rank}{bracket}{rest}"
            machine = self._members[number].machine
            beside = sorted(its for other, its in form.ranks.items() if self._members[other].machine is machine)
            at = beside.index(rank)
            self._answer(number, replace(place, rank=rank, local_rank=at, local_world_size=len(beside), host=machine.host))
        if self._generations.restarts_left:
            for each in self._machines:
                each.do(KeepReady())

    def _answer(self, number: int, answer: Place | Finish | GiveUp) -> None:
        self._waiting.remove(number)
        self._tell(number, answer)

    def _tell(self, number: int, answer: Place | Finish | GiveUp | Summoned | Listens | RankEnded) -> None:
        self._members[number].machine.do(Tell(number, to_line(answer).decode()))
