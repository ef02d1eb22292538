"""How the ranks of a job come to one transport when none is set."""

from __future__ import annotations

import logging

import pytest

import commsched
from commsched.control.end import ControlEnd
from commsched.core.interfaces import Transport
from commsched.core.world import World
from commsched.session.local import local_sessions
from commsched.settings import Settings
from commsched.transports.backends.local import LocalWorld
from commsched.transports.open import Capabilities, transport_name

MPI = Capabilities(mpi4py=True)


def chosen(monkeypatch: pytest.MonkeyPatch, seen: dict[int, Capabilities], settings: Settings) -> list[str]:
    """What each rank's session would open, and the line. The ranks were started by mpiexec."""
    names: dict[int, str] = {}

    def open_transport(rank: int, control: ControlEnd) -> Transport:
        world = World(rank, len(seen), rank, len(seen), "mpiexec")
        names[rank] = transport_name(world, settings, str(rank), control.gather_next)
        return local.transport(rank, control.report)

    monkeypatch.setattr("commsched.transports.open.detect_capabilities", lambda device: seen[int(device)])
    local = LocalWorld(len(seen))
    for session in local_sessions(len(seen), open_transport=open_transport):
        session.abort("the test is over")
    return [names[rank] for rank in sorted(names)]


def test_all_ranks_choose_alike_and_rank_0_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "commsched")
    assert chosen(monkeypatch, {0: MPI, 1: MPI}, Settings()) == ["mpi", "mpi"]
    assert caplog.messages == ["transport=auto: mpi (started by mpiexec)"]


def test_ranks_that_choose_differently_are_told_both_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(commsched.ConfigError) as raised:
        chosen(monkeypatch, {0: Capabilities(), 1: MPI}, Settings())
    assert str(raised.value) == (
        "transport=auto is ps on rank 0 (started by mpiexec, but mpi4py is missing: "
        'pip install "commsched[mpi]" gives mpi) but mpi on rank 1 (started by mpiexec); set transport'
    )


def test_a_transport_that_is_set_is_not_spoken_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "commsched")
    assert chosen(monkeypatch, {0: Capabilities(), 1: MPI}, Settings(transport="ps")) == ["ps", "ps"]
    assert caplog.messages == []
