"""What ranks tell each other of their addresses before any reaches another."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest

import commsched.session.opening
from commsched import ConfigError
from commsched.control.rendezvous import Reached
from commsched.core.world import World
from commsched.session.opening import open_session
from commsched.settings import Settings
from commsched.testing.world import run_world
from commsched.transports import users_of
from commsched.tuner import link

pytestmark = pytest.mark.timeout(60)


def open_two(tmp_path: Path, **set_by_user: object) -> list[object]:
    """Two ranks over real channels, which end at once; what each raised, or None."""

    def rank_main(rank: int) -> object:
        keywords = {"rendezvous": str(tmp_path / "control.json"), "transport": "ps", "join_within": 20.0, **set_by_user}
        settings = Settings.load(keywords, {})
        try:
            with open_session(World(rank, 2, rank, 2, "threads"), settings):
                return None
        except ConfigError as error:
            return str(error)

    return run_world(2, rank_main, timeout_seconds=40)


def test_a_loopback_address_of_a_rank_elsewhere_is_refused_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = itertools.count()
    monkeypatch.setattr(commsched.session.opening, "reached_at", lambda host: Reached(host, True, f"machine {next(machines)}"))
    first, second = open_two(tmp_path)
    assert first == second
    assert str(first).startswith("rank 0 would be reached at 127.0.0.1, but rank 1 is on another machine")


def test_addresses_that_no_gradient_takes_are_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI has connections of its own, and the control channel may go through a tunnel that begins at loopback."""

    def opened(context: object, name: str) -> None:
        raise ConfigError(f"{name} is opened")

    machines = itertools.count()
    monkeypatch.setattr(commsched.session.opening, "reached_at", lambda host: Reached(host, True, f"machine {next(machines)}"))
    monkeypatch.setattr(commsched.session.opening, "transport_name", lambda *about: "mpi")
    monkeypatch.setattr(commsched.session.opening, "open_named", opened)
    assert "mpi is opened" in open_two(tmp_path)  # one rank may hear of the other's


def test_a_faster_network_of_all_ranks_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link, "faster_networks", lambda host: {"10.1.0.0/16": "10.1.0.1 (fast0, 100000 Mb/s)"})
    with caplog.at_level(logging.WARNING):
        assert open_two(tmp_path) == [None, None]
    [line] = [message for message in caplog.messages if "faster" in message]
    assert line == (
        "gradients travel by 127.0.0.1 (loopback), but every rank has a faster card in 10.1.0.0/16, where rank 0 is at "
        "10.1.0.1 (fast0, 100000 Mb/s): set control to that address, or host on every rank to its own"
    )


def test_a_setting_that_the_transport_does_not_use_is_refused(tmp_path: Path) -> None:
    assert open_two(tmp_path, order="static") == 2 * [
        f"order='static' has no effect with transport=ps: it is for {', '.join(users_of('order'))}"
    ]


def test_a_setting_that_a_chosen_transport_does_not_use_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert open_two(tmp_path, transport="auto", order="static") == [None, None]
    said = f"order='static' has no effect with transport=ps: it is for {', '.join(users_of('order'))}"
    assert caplog.messages.count(said) == 1


def test_a_collective_that_a_chosen_transport_does_not_have_is_refused(tmp_path: Path) -> None:
    said = f"collective='rsag' has no effect with transport=ps: it is for {', '.join(users_of('collective'))}"
    assert open_two(tmp_path, transport="auto", collective="rsag") == [said, said]
