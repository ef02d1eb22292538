"""A rank whose neighbour on the host ends before it has heard why names what ended the job, and not the neighbour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from commsched.control.end import ControlEnd
from commsched.core.errors import CommschedError, PeerLost
from commsched.core.group import TensorGroup
from commsched.core.interfaces import Transport
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.world import World
from commsched.session.local import local_sessions
from commsched.session.session import Session
from commsched.settings import Settings
from commsched.testing.world import run_world
from commsched.transports.backend import TransportContext
from commsched.transports.hierarchy import open_hierarchy

from .worlds import LocalNetwork

MANIFEST = Manifest((TensorSpec("weight", (4,), "float32"),))


class Late:
    """Stands before the callbacks of a rank to which the control channel's verdict comes late, and takes what it reports."""

    def __init__(self, session: Session) -> None:
        self.reports: SimpleQueue[CommschedError] = SimpleQueue()
        self._verdicts: SimpleQueue[Callable[[], None]] = SimpleQueue()
        control = session._control
        tell = control._tell_failure
        control._tell_failure = lambda: self._verdicts.put(tell)  # type: ignore[method-assign]
        control.report = session.core._on_failure = self.reports.put  # type: ignore[method-assign, assignment]

    def hear(self) -> None:
        self._verdicts.get(timeout=60)()


@contextmanager
def job() -> Iterator[tuple[list[Session], list[TensorGroup]]]:
    """Ranks 0 and 1 on a host, which rank 0 leads, 2 and 3 on another; each has begun a step."""
    network = LocalNetwork()

    def open_transport(rank: int, control: ControlEnd) -> Transport:
        context = TransportContext(
            world=World(rank, 4, rank % 2, 2, "threads"),
            settings=Settings(hierarchy="on"),
            host=f"127.0.0.{rank // 2 + 1}",
            token="",
            control_address="",
            gather=control.gather_next,
            on_failure=lambda error: control.report(error),  # which the test may replace
            when_failed=control.when_failed,
        )
        return open_hierarchy(context, network)

    def register(rank: int) -> TensorGroup:
        group = sessions[rank].register(MANIFEST, {"float32": memoryview(bytearray(16))})
        group.begin_step()
        return group

    sessions = local_sessions(4, open_transport=open_transport)
    try:
        yield sessions, run_world(4, register)
    finally:
        for session in sessions:
            session.abort("the test is over")


@pytest.mark.parametrize(("late", "neighbour", "victim"), [(3, 2, 1), (1, 0, 3), (0, 1, 2), (2, 3, 0)])
def test_a_neighbour_that_ended_first_is_not_named(late: int, neighbour: int, victim: int) -> None:
    with job() as (sessions, groups):
        verdict = Late(sessions[late])
        sessions[neighbour].report(PeerLost(f"rank {victim} is gone"))
        sessions[neighbour].abort("it has heard")
        assert f"rank {neighbour}" in str(verdict.reports.get(timeout=60))  # by who reads its link
        groups[late].notify_ready(0)
        if late % 2:  # a member, that writes to its leader
            assert str(verdict.reports.get(timeout=60)).endswith("is gone: Broken pipe")
            sessions[late].core.check()
        verdict.hear()
        with pytest.raises(PeerLost, match=rf"(?m)^rank {victim} is gone$"):
            groups[late].proxies[0].wait()


def test_a_link_that_the_verdict_itself_ends_is_not_named() -> None:
    with job() as (sessions, groups):
        verdict = Late(sessions[3])

        def write(_: CommschedError) -> None:
            """After the transport has ended its link, and before the core is told why."""
            groups[3].notify_ready(0)
            while not str(verdict.reports.get(timeout=60)).endswith("is gone: Broken pipe"):
                pass  # by who reads the link

        sessions[3].when_failed(write)
        sessions[0].report(PeerLost("rank 1 is gone"))
        verdict.hear()
        with pytest.raises(PeerLost, match=r"(?m)^rank 1 is gone$"):
            groups[3].proxies[0].wait()


def test_a_group_added_after_the_leader_ended_does_not_name_it() -> None:
    with job() as (sessions, _):
        verdict = Late(sessions[3])
        sessions[2].report(PeerLost("rank 1 is gone"))
        sessions[2].abort("it has heard")
        assert "rank 2" in str(verdict.reports.get(timeout=60))

        def add() -> None:
            sessions[3].core.add_group(plan, {"float32": memoryview(bytearray(16))})

        def hear() -> None:
            verdict.reports.get(timeout=60)
            verdict.hear()

        plan = cut(MANIFEST, 16)
        with pytest.raises(PeerLost, match=r"^rank 1 is gone"):
            run_world(2, lambda rank: [add, hear][rank]())
