"""Who shares a host, who leads, and whether there is a hierarchy at all; how the ranks of a host find each other, and who is
refused."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from dataclasses import replace

import pytest

from commsched.core.errors import ConfigError, PeerLost, PeerTimeout, TransportError
from commsched.testing.world import run_world
from commsched.transports.hierarchy import topology as meetings
from commsched.transports.hierarchy.messages import Kind, LocalMessage, UnixConnection
from commsched.transports.hierarchy.topology import (
    MAX_MESH,
    HostRendezvous,
    HostTopology,
    RankLocation,
    connect_to_leader,
    is_wanted,
)


def seats(*places: tuple[str, int], shares_memory: bool = True) -> list[RankLocation]:
    return [RankLocation(address, local_rank, shares_memory) for address, local_rank in places]


TWO_BY_TWO = seats(("a", 0), ("a", 1), ("b", 0), ("b", 1))


def test_ranks_of_one_address_share_a_host_and_the_lowest_local_rank_leads_but_rank_0_leads_its_own():
    layout = HostTopology.of(seats(("a", 1), ("b", 1), ("a", 0), ("b", 0), ("c", 0)))
    assert layout.hosts == ((0, 2), (3, 1), (4,))
    assert layout.leaders == (0, 3, 4)
    assert [layout.host_of(rank) for rank in range(5)] == [0, 1, 0, 1, 2]


@pytest.mark.parametrize(
    ("hierarchy", "collective", "places", "wanted"),
    [
        ("auto", "auto", TWO_BY_TWO, True),
        ("auto", "all_reduce", TWO_BY_TWO, True),
        ("auto", "rsag", TWO_BY_TWO, False),
        ("auto", "all_reduce", seats(("a", 0), ("a", 1)), False),
        ("auto", "all_reduce", seats(("a", 0), ("b", 0)), False),
        ("auto", "all_reduce", seats(("a", 0), ("a", 1), ("b", 0)), True),
        ("auto", "all_reduce", seats(("a", 0), ("a", 0), ("b", 0)), False),  # two containers, say
        ("auto", "all_reduce", seats(("a", 0), ("a", 1), ("b", 0), shares_memory=False), False),
        ("on", "all_reduce", seats(("a", 0), ("a", 1)), True),
        ("on", "rsag", TWO_BY_TWO, True),
        ("off", "all_reduce", TWO_BY_TWO, False),
    ],
)
def test_auto_is_on_where_it_gains(hierarchy, collective, places, wanted):
    assert is_wanted(hierarchy, collective, HostTopology.of(places), places) is wanted


def test_auto_is_on_where_the_ranks_of_one_host_would_need_too_many_connections():
    for ranks, meshed, wanted in ((MAX_MESH, True, False), (MAX_MESH + 1, True, True), (MAX_MESH + 1, False, False)):
        places = seats(*(("a", rank) for rank in range(ranks)))
        assert is_wanted("auto", "auto", HostTopology.of(places), places, meshed) is wanted


def test_auto_is_off_on_one_host_if_a_rank_has_set_how_to_use_the_network():
    places = seats(*(("a", rank) for rank in range(MAX_MESH + 1)))
    places[7] = replace(places[7], sets_network=True)  # the rate may differ between ranks
    assert not is_wanted("auto", "auto", HostTopology.of(places), places)
    assert is_wanted("on", "auto", HostTopology.of(places), places)
    several = [*TWO_BY_TWO, replace(TWO_BY_TWO[0], address="c", sets_network=True)]
    assert is_wanted("auto", "auto", HostTopology.of(several), several)  # the leaders do use the network


@pytest.mark.parametrize(
    ("places", "why"),
    [
        (seats(("a", 0), ("a", 0)), "ranks 0 and 1 of a both say that their local rank is 0"),
        (seats(("a", 1), ("a", 0), ("a", 1)), "ranks 0 and 2 of a both say that their local rank is 1"),
        (seats(("a", 0), ("a", 1), shares_memory=False), "rank 0 runs on a system without memfd_create"),
    ],
)
def test_on_where_it_cannot_be_says_why(places, why):
    with pytest.raises(ConfigError, match=f"hierarchy='on' is not possible: {why}"):
        is_wanted("on", "all_reduce", HostTopology.of(places), places)


def never(callback: object) -> None:
    """A job that does not fail."""


def stranger(meeting: HostRendezvous) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{meeting.name}")
    return connection


def test_every_member_is_linked_whatever_the_order_they_come_in() -> None:
    meeting = HostRendezvous([3, 5])

    def rank(index: int) -> None:
        if index == 0:
            for member, link in meeting.wait(60.0, never).items():
                link.send(LocalMessage(Kind.PUSH, step=member))
                link.close()
        else:
            number = (3, 5)[index - 1]
            link = connect_to_leader(meeting.name, number, 0)
            received = link.receive()
            assert received is not None
            assert received[0].step == number
            link.close()

    run_world(3, rank)
    meeting.close()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "it ended at once"),
        (b"hello", "not a message of this host's ranks: a message of 5 bytes with 0 descriptors"),
        (LocalMessage(Kind.HELLO, rank=9), "it sent HELLO as rank 9"),
        (LocalMessage(Kind.PUSH, rank=1), "it sent PUSH as rank 1"),
    ],
)
def test_who_is_no_member_is_refused_and_does_no_harm(
    said: bytes | LocalMessage, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    meeting = HostRendezvous([1])
    connection = stranger(meeting)
    if isinstance(said, LocalMessage):
        UnixConnection(connection).send(said)
    elif said:
        connection.send(said)
    else:
        connection.close()
    member = connect_to_leader(meeting.name, 1, 0)
    with caplog.at_level(logging.WARNING, "commsched"):
        links = meeting.wait(60.0, never)
    assert list(links) == [1]
    assert f"refused a connection of this host: {why}" in caplog.text
    for each in (*links.values(), member, connection):
        each.close()
    meeting.close()


def test_a_second_process_that_says_it_is_a_member_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    meeting = HostRendezvous([1, 2])
    first, second, other = (connect_to_leader(meeting.name, rank, 0) for rank in (1, 1, 2))
    with caplog.at_level(logging.WARNING, "commsched"):
        links = meeting.wait(60.0, never)
    assert "it sent HELLO as rank 1" in caplog.text
    first.send(LocalMessage(Kind.PUSH, step=7))
    received = links[1].receive()
    assert received is not None
    assert received[0].step == 7
    for each in (*links.values(), first, second, other):
        each.close()
    meeting.close()


def test_who_says_nothing_holds_the_others_up_for_a_while_only_and_members_may_be_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meetings, "_HELLO_SECONDS", 0.05)
    meeting = HostRendezvous([1])
    silent, member = stranger(meeting), connect_to_leader(meeting.name, 1, 0)
    with caplog.at_level(logging.WARNING, "commsched"):
        links = meeting.wait(60.0, never)
    assert "refused a connection of this host: timed out" in caplog.text
    assert links[1]._connection.gettimeout() is None
    for each in (*links.values(), member, silent):
        each.close()
    meeting.close()


def test_another_user_is_refused_by_both(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    meeting = HostRendezvous([1])
    link = connect_to_leader(meeting.name, 1, 0)
    monkeypatch.setattr(meetings.os, "geteuid", lambda: 12345)
    said = rf"the ranks of a host must belong to one user; one belongs to user {os.getuid()}, another to user 12345"
    with pytest.raises(ConfigError, match=said):
        connect_to_leader(meeting.name, 1, 0)
    with pytest.raises(PeerTimeout):
        meeting.wait(0.2, never)
    assert f"refused a connection of this host: {said}" in caplog.text
    link.close()
    meeting.close()


def test_who_does_not_come_is_named() -> None:
    meeting = HostRendezvous([1, 2])
    link = connect_to_leader(meeting.name, 1, 0)
    with pytest.raises(PeerTimeout, match=r"rank 2 of this host did not connect within 0 s"):
        meeting.wait(0.05, never)
    link.close()
    meeting.close()


def test_a_system_that_lets_nobody_connect_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = HostRendezvous([1, 2])

    class Exhausted:
        def settimeout(self, seconds: float) -> None: ...

        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(meeting, "_listening", Exhausted())
        with pytest.raises(TransportError, match="ranks 1, 2 of this host cannot connect: Too many open files"):
            meeting.wait(60.0, never)
    meeting.close()


def test_a_failure_elsewhere_ends_the_waiting() -> None:
    meeting = HostRendezvous([1])
    failures = []
    registered = threading.Event()

    def when_failed(callback: object) -> None:
        failures.append(callback)
        registered.set()

    def fail(rank: int) -> None:
        if rank == 0:
            with pytest.raises(PeerLost, match="rank 1 is gone"):
                meeting.wait(60.0, when_failed)
        else:
            assert registered.wait(60)
            failures[0](PeerLost("rank 1 is gone"))

    run_world(2, fail)
    meeting.close()


def test_a_leader_that_is_not_reached_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"rank 3 has the address of rank 2 but does not reach it within the host .*hierarchy=off"
    ):
        connect_to_leader("commsched-nobody", 3, 2)
