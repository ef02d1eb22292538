"""The host of an elastic job decides alone; what its machines would do, and what their processes would say, is written here."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, cast

import pytest

from commsched.cli.elastic import job as elastic_job
from commsched.cli.elastic import links
from commsched.cli.elastic.follow import follow
from commsched.cli.elastic.job import _ElasticJob
from commsched.cli.elastic.kept import KeptServers
from commsched.cli.elastic.machine import LocalMachine, Machine, ServerEnded, Signalled
from commsched.cli.launch import Among, Elasticity
from commsched.control.elastic_messages import (
    Closes,
    EndAll,
    Ended,
    Examine,
    HostAnswer,
    KillMember,
    LauncherHello,
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
from commsched.control.generations import Asked, GiveUp
from commsched.core.errors import TransportError


class Recorded:
    """A machine that records its orders instead of following them; also the link to it."""

    def __init__(self, host: str, room: int) -> None:
        self.host, self.room = host, room
        self.orders: list[Any] = []
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.interrupted_by = 0
        self.is_empty = False
        self.is_finished = False

    def do(self, order: Any) -> None:
        self.orders.append(order)

    send = do

    def finish(self) -> None:
        self.is_finished = True

    def serve(self, count: int, generation: int) -> list[str]:
        return []

    def reported(self, event: Any) -> Any:
        return event

    def told(self, kind: type) -> list[int]:
        """The members that got a message of ``kind``, since the last call."""
        said = [order.member for order in self.orders if isinstance(order, Tell) and isinstance(from_line(order.line), kind)]
        self.orders.clear()
        return said


class World:
    """A job of ``ranks``, with room for two of them on the host's machine, and for the others on another one."""

    def __init__(self, ranks: int, max_restarts: int = 0, replace_within: float = 1e9, kept: KeptServers | None = None) -> None:
        self.here = Recorded("a", 2)
        among = Among("a:1", "token", "job", 2, None, None, 5.0)
        elasticity = Elasticity(1, max_restarts, 60.0, replace_within, False, among, kept)
        self.job = _ElasticJob(cast(LocalMachine, self.here), ranks, 0, elasticity)
        self.there = self.another("b", ranks - 2)
        for rank in range(ranks):
            self.job._want(rank)
        self.job._settle()
        self.start(*range(ranks))
        self.ask(*range(ranks), steps=None)
        assert self.generation == 1

    @property
    def generation(self) -> int:
        form = self.job._generation
        return 0 if form is None else form.generation

    def another(self, host: str, room: int) -> links.RemoteMachine:
        link = cast(links.Link, Recorded(host, room))
        machine = links.RemoteMachine(link, LauncherHello(self.job._settings, room, host))
        self.job._came(machine)
        return machine

    def of(self, member: int) -> Machine:
        return self.job._members[member].machine

    def start(self, *members: int) -> None:
        for member in members:
            self.job._reported(self.of(member), Started(member, 100 + member))

    def ask(self, *members: int, steps: int | None, **more: Any) -> None:
        for member in members:
            line = to_line(Asked(steps=steps, **more)).decode()
            self.job._reported(self.of(member), MemberSaid(member, line))

    def is_over(self) -> bool:
        return self.job._generations.is_closed


def test_a_machine_whose_rank_has_left_is_no_loss(capfd: pytest.CaptureFixture[str]) -> None:
    """Its process was still ending. Those who go on without it are not disturbed, and no restart is spent."""
    world = World(3)
    world.job._reported(world.there, Closes())
    world.ask(2, steps=5, leaves=True)
    world.ask(0, 1, steps=5, lost=2)
    assert world.generation == 2
    world.here.orders.clear()
    capfd.readouterr()
    world.job._gone(world.there, "it was silent")
    assert world.here.told(Summoned) == []
    assert "lost" not in capfd.readouterr().err
    assert not world.is_over()
    assert not world.job._members[2].lives
    world.ask(0, 1, steps=7, is_over=True, is_done=True)
    world.job._ended(Ended(0, 0))
    world.job._ended(Ended(1, 0))
    assert (world.job._ends.exit_code(), world.job._ends.what_happened()) == (0, "")


def test_a_process_that_has_left_and_is_stopped_in_its_end_is_killed_and_that_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    world = World(3)
    world.ask(2, steps=5, leaves=True)
    world.ask(0, 1, steps=5, lost=2)
    assert world.generation == 2
    orders = cast(Recorded, world.there.link).orders
    orders.clear()
    world.job._tick()
    assert orders == []  # it has some seconds
    monkeypatch.setattr(elastic_job, "_ASK_SECONDS", -1.0)
    world.job._tick()
    assert orders == [Examine(2)]
    world.job._reported(world.there, MemberStopped(2, 0))
    assert orders == [Examine(2), KillMember(2)]
    assert capfd.readouterr().err.endswith("rank 2 (pid 102 at b) is killed: it was stopped\n")
    world.job._tick()
    world.job._reported(world.there, Ended(2, -9))
    world.ask(0, 1, steps=7, is_over=True, is_done=True)
    world.job._ended(Ended(0, 0))
    world.job._ended(Ended(1, 0))
    assert orders == [Examine(2), KillMember(2)]
    assert (world.job._ends.exit_code(), world.job._ends.what_happened()) == (0, "")


def test_so_is_one_that_has_made_all_steps_which_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_job, "_ASK_SECONDS", -1.0)
    world = World(3)
    world.ask(0, 1, 2, steps=7, is_over=True, is_done=True)
    world.job._ended(Ended(0, 0))
    world.job._ended(Ended(1, 0))
    world.job._tick()
    assert cast(Recorded, world.there.link).orders[-1] == Examine(2)
    world.job._reported(world.there, MemberStopped(2, 0))
    assert cast(Recorded, world.there.link).orders[-1] == KillMember(2)
    world.job._reported(world.there, Ended(2, -9))
    assert world.job._ends.exit_code() == 137


def test_a_machine_whose_rank_is_late_does_not_disturb_the_others() -> None:
    world = World(3, max_restarts=1, replace_within=0.0)
    spare = world.another("c", 1)
    world.job._gone(world.there, "it was silent")
    assert world.here.told(Summoned) == [0, 1]
    world.ask(0, 1, steps=5, lost=2)
    world.job._generations._first_asked_at = -1.0  # long ago
    world.job._tick()
    assert world.generation == 2
    assert any(isinstance(order, StartMember) for order in cast(Recorded, spare.link).orders)
    world.here.orders.clear()
    world.job._gone(spare, "it was silent")
    assert world.here.told(Summoned) == []
    assert not world.is_over()


@pytest.mark.parametrize("says_so", [True, False])
def test_an_order_to_start_a_process_that_crosses_the_signal_to_its_launcher_costs_no_restart(says_so: bool) -> None:
    """The launcher may say so, or end before it has read the order."""
    world = World(3, max_restarts=1)
    world.job._reported(world.there, Ended(2, 1))
    world.job._settle()  # orders a process from the machine that had the lost one
    assert world.of(3) is world.there
    world.job._reported(world.there, Closes())
    if says_so:
        world.job._reported(world.there, NotStarted(3))
    else:
        world.job._gone(world.there, "it ended the connection")
    world.job._settle()
    spare = world.another("c", 1)
    world.job._settle()
    assert cast(Recorded, spare.link).orders[-1] == StartMember(3, 2, 0)
    world.start(3)
    world.ask(0, 1, steps=5, lost=2)
    world.ask(3, steps=None)
    assert world.generation == 2
    assert world.job._generations.restarts_left == 0  # one was for the lost process


def test_a_rank_that_others_cannot_reach_is_named_with_its_machine(capfd: pytest.CaptureFixture[str]) -> None:
    world = World(3, max_restarts=3)
    capfd.readouterr()
    world.ask(0, 1, 2, steps=5, lost=2)
    world.ask(0, 1, 2, steps=5)  # they could not begin
    assert world.generation == 3
    assert capfd.readouterr().err.splitlines() == [
        "commsched run: the connection to rank 2 (pid 102 at b) was lost, and no rank had failed; restarts left: 2",
        "commsched run: the job goes on with 3 ranks, from step 5",
        "commsched run: a connection or a server was lost, and no rank had failed; restarts left: 1",
        "commsched run: the job goes on with 3 ranks, from step 5",
    ]


def test_a_machine_is_lost_with_all_its_ranks_at_once() -> None:
    """No generation begins with one of them, although all others have asked."""
    world = World(4)
    world.here.orders.clear()
    world.ask(0, 1, 3, steps=5, lost=2)
    world.job._gone(world.there, "it was silent")
    assert world.generation == 2
    assert world.job._generation is not None
    assert dict(world.job._generation.ranks) == {0: 0, 1: 1}
    assert world.here.told(Place) == [0, 1]


def losses(*machines: Recorded) -> list[tuple[int, RankEnded]]:
    """The members that were told of a loss, and of which one, since the last call."""
    found = []
    for machine in machines:
        said = [(order.member, from_line(order.line)) for order in machine.orders if isinstance(order, Tell)]
        found += [(member, each) for member, each in said if isinstance(each, RankEnded)]
        machine.orders.clear()
    return found


def test_those_that_still_open_a_generation_hear_at_once_that_it_has_lost_a_rank() -> None:
    """It may not have joined the control channel yet, which would wait for it."""
    world = World(4, max_restarts=9)
    there = cast(Recorded, world.there.link)
    world.ask(0, steps=None)  # it has noticed
    assert losses(world.here, there) == [(each, RankEnded(1, "rank 0 (pid 100 at a) has lost others", 0)) for each in (1, 2, 3)]
    world.job._reported(world.there, Ended(2, -9))
    world.ask(1, 3, steps=5)
    assert losses(world.here, there) == []  # once is enough


def test_a_process_that_ends_or_a_server_is_such_a_loss_too() -> None:
    world = World(3, max_restarts=9)
    there = cast(Recorded, world.there.link)
    world.job._reported(world.there, Ended(2, -9))
    assert losses(world.here, there) == [(each, RankEnded(1, "rank 2 (pid 102 at b) has ended", 2)) for each in (0, 1)]
    world.job._settle()
    world.start(3)
    world.ask(0, 1, steps=5)
    world.ask(3, steps=None)
    assert world.generation == 2
    world.job._tell_of_loss(1, "server 0 (pid 7) has ended")  # of the generation before
    assert losses(world.here, there) == []
    world.job._tell_of_loss(2, "server 0 (pid 9) has ended")
    assert losses(world.here, there) == [(each, RankEnded(2, "server 0 (pid 9) has ended")) for each in (0, 1, 3)]


def test_a_rank_that_has_made_all_steps_is_no_loss() -> None:
    world = World(3)
    world.ask(0, steps=7, is_over=True, is_done=True)
    assert losses(world.here, cast(Recorded, world.there.link)) == []


def test_the_cause_is_that_of_the_process_and_not_of_an_earlier_one_of_its_rank() -> None:
    world = World(3, max_restarts=1)
    world.job._reported(world.here, Ended(1, 1, ("joined", "heard")))  # as a consequence
    world.job._settle()
    world.start(3)
    world.ask(0, 2, steps=3, lost=1)
    world.ask(3, steps=None)
    assert world.generation == 2
    world.job._reported(world.here, Ended(3, 3, ("joined",)))  # by its own fault
    world.job._reported(world.here, Ended(0, 1, ("joined", "heard")))
    world.job._reported(world.there, Ended(2, 1, ("joined", "heard")))
    assert world.is_over()
    assert world.job._ends.what_happened().startswith("rank 1 (pid 103 at a) ended with exit code 3")
    assert world.job._ends.exit_code() == 3


def test_it_is_not_said_of_a_rank_lost_with_its_launcher_that_it_had_not_joined() -> None:
    """Its reports are lost with it."""
    world = World(3)
    world.job._gone(world.there, "it was silent")
    for member in range(2):
        world.job._reported(world.here, Ended(member, 1, ("joined", "heard")))
    assert world.is_over()
    assert world.job._ends.what_happened() == (
        "rank 2 (pid 102 at b) was lost with its launcher; then 2 more ended with errors"
    )


def test_a_launcher_says_that_the_one_that_hosts_the_job_has_got_a_signal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Host:
        def messages(self) -> Iterator[Any]:
            yield from (HostAnswer(""), EndAll(signal.SIGTERM), Over(143, ""))

        def close(self) -> None:
            pass

    here = Recorded("b", 1)
    monkeypatch.setattr(links, "connect_to_host", lambda *_: Host())
    among = Among("10.0.0.1:7", "token", "job", 1, None, None, 5.0)
    assert follow(cast(LocalMachine, here), among, {}, 5.0) == 143
    assert here.orders == [EndAll(signal.SIGTERM)]
    assert capfd.readouterr().err.splitlines() == [
        "commsched run: b takes part in the job of 10.0.0.1:7, with room for 1 rank",
        "commsched run: the launcher at 10.0.0.1:7, which hosts the job, has got SIGTERM, and the job ends",
    ]


def test_the_launcher_says_which_signal_has_ended_the_job_and_how_its_ranks_have_ended() -> None:
    world = World(5)
    world.here.interrupted_by = signal.SIGTERM
    world.job._reported(world.here, Ended(0, 0))
    world.job._reported(world.here, Ended(1, 1, ("joined", "heard")))
    world.job._reported(world.there, Ended(2, -signal.SIGTERM))
    world.job._reported(world.there, Ended(3, -signal.SIGTERM, was_ended=True))
    world.job._reported(world.there, Ended(4, 3))
    assert world.job._after_signal(signal.SIGTERM) == (
        "SIGTERM has ended the job: rank 0 ended without an error; rank 2 ended by it; rank 4 (pid 104 at b) ended with exit "
        "code 3; rank 3 had to be ended; rank 1 ended with an error, since others had left"
    )


def test_a_rank_that_waits_leaves_when_the_launcher_of_its_machine_gets_a_signal(capfd: pytest.CaptureFixture[str]) -> None:
    """It is no loss that counts, but others go on without it, or with another one."""
    world = World(4, max_restarts=2)
    world.job._ended(Ended(3, -9))
    world.ask(2, steps=5)
    world.here.orders.clear()
    orders = cast(Recorded, world.there.link)
    orders.orders.clear()
    world.job._reported(world.there, Closes())
    assert orders.told(GiveUp) == [2]
    assert "rank 2 (pid 102 at b) leaves" in capfd.readouterr().err
    world.job._ended(Ended(2, 0))
    assert not world.is_over()
    assert world.job._ends.exit_code() == 0


def test_ranks_that_wait_for_a_new_one_are_told_of_a_signal_and_can_leave() -> None:
    world = World(3, max_restarts=1)
    world.job._reported(world.there, Ended(2, -9))
    world.ask(0, 1, steps=5)
    world.here.orders.clear()
    world.here.interrupted_by = signal.SIGTERM
    world.here.events.put(Signalled(signal.SIGTERM))
    world.here.events.put(Ended(0, 0))
    world.here.events.put(Ended(1, 0))
    for member in world.job._members.values():
        member.lives = member.lives and member.machine is world.job._here
    world.job._wait()
    assert world.here.told(GiveUp) == [0, 1]


def test_a_launcher_that_comes_when_the_job_has_ended_is_told() -> None:
    world = World(3)
    late = Recorded("c", 1)
    machine = links.RemoteMachine(cast(links.Link, late), LauncherHello(world.job._settings, 1, "c"))
    for member in range(3):
        world.ask(member, steps=7, is_over=True, is_done=True)
    for member in range(3):
        world.job._ended(Ended(member, 0))
    world.here.events.put(links.Came(machine))
    world.job._refuse_the_last()
    assert late.orders == [HostAnswer("the job has ended")]
    assert late.is_finished
    assert not any(isinstance(order, Over) for order in late.orders)


class Kept:
    """Servers that were started by hand. ``found``: those that answer, generation by generation."""

    addresses = ("a:7", "b:7")

    def __init__(self, *found: list[str]) -> None:
        self._found = iter(found)
        self.jobs: list[str] = []

    def reserve(self, job: str, is_interrupted: object, when_ended: Callable[[str], object]) -> list[str]:
        self.when_ended = when_ended
        self.jobs.append(job)
        found = next(self._found)
        if not found:
            raise TransportError("none of its servers was free within 60 s")
        return found


def places(machine: Recorded) -> list[Place]:
    found = [from_line(order.line) for order in machine.orders if isinstance(order, Tell)]
    machine.orders.clear()
    return [each for each in found if isinstance(each, Place)]


def test_each_generation_has_the_servers_that_answer_and_a_name_of_its_own() -> None:
    kept = Kept(["a:7", "b:7"], ["b:7"])
    world = World(3, max_restarts=3, kept=cast(KeptServers, kept))
    first = [*places(world.here), *places(cast(Recorded, world.there.link))]
    assert [place.servers for place in first] == [("a:7", "b:7")] * 3
    world.ask(0, 1, 2, steps=5)  # a server is lost
    second = [*places(world.here), *places(cast(Recorded, world.there.link))]
    assert [place.servers for place in second] == [("b:7",)] * 3
    kept.when_ended("b:7")
    assert world.here.events.get_nowait() == ServerEnded("the server at b:7 serves it no more", 2)
    assert [{place.job for place in each} for each in (first, second)] == [{job} for job in kept.jobs]
    assert len(set(kept.jobs)) == 2
    assert kept.jobs[1].startswith("job generation 2 ")


def test_a_job_without_a_server_ends(capfd: pytest.CaptureFixture[str]) -> None:
    world = World(3, max_restarts=3, kept=cast(KeptServers, Kept(["a:7"], [])))
    world.here.orders.clear()
    world.ask(0, 1, 2, steps=5)
    assert world.here.told(GiveUp) == [0, 1]
    said = "commsched run: the job cannot go on: none of its servers was free within 60 s"
    assert capfd.readouterr().err.splitlines()[-1] == said
    assert world.is_over()


def test_one_rank_that_is_left_needs_no_server() -> None:
    world = World(3, kept=cast(KeptServers, Kept(["a:7"])))
    world.job._reported(world.here, Ended(1, 1))
    world.job._gone(world.there, "it was silent")
    world.ask(0, steps=5, lost=1)
    assert world.generation == 2
