from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched.control import roster as roster_module
from commsched.control.messages import (
    PROTOCOL,
    Announce,
    Announced,
    AskMissing,
    Commit,
    Disconnect,
    End,
    Failed,
    FromRank,
    Gather,
    GatherPart,
    Heartbeat,
    Hello,
    Leave,
    Left,
    Member,
    Message,
    Missing,
    Part,
    Parting,
    Ping,
    Pong,
    Prepare,
    Prepared,
    Propose,
    Ready,
    Released,
    ReportFailure,
    ToRank0,
    Welcome,
)
from commsched.control.roster import Roster, Send, first_common_steps
from commsched.core.errors import PeerLost, ProtocolError, to_record
from commsched.version import __version__


def new_roster(world_size: int) -> Roster:
    return Roster(world_size, "h", 70, fail_after_seconds=10.0, join_within_seconds=60.0, now=0.0, servers=2)


def member(rank: int, world_size: int = 2) -> Member:
    return Member("rank", rank, world_size, f"h{rank}", 70 + rank)


def hello(who: Member, within_seconds: float = 60.0) -> Hello:
    return Hello(__version__, PROTOCOL, who, within_seconds)


def joined(world_size: int) -> Roster:
    """Rank ``r`` is on connection ``r``."""
    roster = new_roster(world_size)
    for rank in range(world_size):
        roster.received(rank, hello(member(rank, world_size)), 0.0)
    assert roster.ready
    return roster


def told(sends: list[Send]) -> str:
    """The failure in ``sends``."""
    [message] = {send.message.error["message"] for send in sends if isinstance(send.message, Failed)}
    return message


# --- joining ---


def test_ranks_are_welcomed_and_told_when_all_are_there() -> None:
    roster = new_roster(2)
    welcome = Welcome("h", 70)
    assert roster.received(7, hello(member(1)), 0.0) == [Send((7,), welcome)]
    assert roster.received(9, hello(member(0)), 1.0) == [Send((9,), welcome), Send((7, 9), Ready(""))]


def test_a_refused_process_may_send_heartbeats_until_it_knows() -> None:
    roster = joined(2)
    roster.received(1, Leave(), 0.0)
    assert roster.received(7, hello(member(1)), 0.0) == [Send((7,), End())]
    assert roster.received(7, Heartbeat(), 0.0) == []
    roster.disconnected(7)
    assert roster.received(7, hello(member(1)), 0.0) == [Send((7,), End())]


def test_all_are_told_where_to_ask_whether_rank_0_runs() -> None:
    roster = new_roster(2)
    roster.received(7, hello(member(1)), 0.0)
    sends = roster.received(9, hello(replace(member(0), witness="h0:5")), 0.0)
    assert sends[-1] == Send((7, 9), Ready("h0:5"))


def test_a_silent_member_whose_witness_says_that_it_runs_is_not_given_up() -> None:
    roster, now = joined(3), 0.0
    while now < 30.0:
        now += 0.1
        for rank in (0, 2):
            roster.received(rank, Heartbeat(), now)
        assert roster.tick(now) == []
        for connection, who in roster.doubtful():
            assert (connection, who) == (1, member(1, 3))
            roster.runs(connection)
    sends: list[Send] = []
    while not sends:  # and no longer than ``fail_after`` once the witness says nothing
        now += 0.1
        for rank in (0, 2):
            roster.received(rank, Heartbeat(), now)
        sends = roster.tick(now)
    assert 35.0 < now < 42.0
    assert told(sends).startswith("rank 1 (host h1, pid 71) has been silent for ")


def test_a_server_may_join_before_or_after_and_hears_who_has_left() -> None:
    roster = new_roster(2)
    early, late = Member.server(0), Member.server(1)
    assert roster.received(5, hello(early), 0.0) == [Send((5,), Welcome("h", 70))]
    roster.received(0, hello(member(0)), 0.0)
    assert roster.received(1, hello(member(1)), 0.0)[-1] == Send((5, 0, 1), Ready(""))
    roster.received(1, Leave(), 0.0)
    sends = roster.received(6, hello(late), 0.0)
    assert [send.message for send in sends if 6 in send.connections] == [Welcome("h", 70), Ready(""), Left({1: 1})]


@pytest.mark.parametrize(
    ("stranger", "message"),
    [
        (member(0, 3), "rank 0 (host h0, pid 70) says there are 3 ranks, but rank 0 says 2"),
        (
            replace(Member.server(2, "s"), pid=9),
            "server 2 (host s, pid 9) is not one of the 2 parameter servers that rank 0 was given",
        ),
        (member(2, 2), "rank 2 (host h2, pid 72) is not one of the 2 ranks, which are counted from 0"),
        (
            Member("rank", 1, 2, "elsewhere", 5),
            "two processes say that they are rank 1: one on host h1, pid 71 and one on host elsewhere, pid 5",
        ),
    ],
)
def test_who_does_not_fit_fails_the_job_while_it_forms(stranger: Member, message: str) -> None:
    roster = new_roster(2)
    roster.received(1, hello(member(1)), 0.0)
    sends = roster.received(8, hello(stranger), 0.0)
    assert told(sends) == message
    assert [send.connections for send in sends] == [(1,), (8,)]
    assert roster.over


def test_another_version_fails_the_job_and_names_both() -> None:
    sends = new_roster(2).received(8, replace(hello(member(1)), version="9.9"), 0.0)
    assert told(sends) == (
        f"rank 1 (host h1, pid 71) runs commsched 9.9, but rank 0 (h) runs commsched {__version__}; "
        "install the same version everywhere"
    )


def test_a_stray_process_is_turned_away_from_a_running_job_which_goes_on() -> None:
    roster = joined(2)
    for stranger in (member(1), member(0, 3), member(5, 2)):
        [send] = roster.received(8, hello(stranger), 0.0)
        assert send.connections == (8,)
        assert isinstance(send.message, Failed)
    [send] = roster.invalid_message(8, ProtocolError("3 bytes"))
    assert send.connections == (8,)
    assert not roster.over


def test_who_says_no_hello_is_turned_away() -> None:
    assert told(joined(2).received(8, Heartbeat(), 0.0)) == "a process sent Heartbeat before its hello"


def test_missing_ranks_are_named_at_the_deadline_of_whoever_waits_least() -> None:
    roster = new_roster(4)
    roster.received(0, hello(member(0, 4), within_seconds=60.0), 0.0)
    roster.received(2, hello(member(2, 4), within_seconds=20.0), 5.0)
    assert roster.tick(24.9) == []
    for rank in (0, 2):
        roster.received(rank, Heartbeat(), 25.0)
    roster.refused("a call from 10.0.0.7: it does not prove this job's token")
    refused = "; rank 0 refused a call from 10.0.0.7: it does not prove this job's token"
    assert told(roster.tick(25.1)) == f"ranks 1, 3 of 4 did not join within 60 s{refused}"


def test_who_comes_late_hears_how_it_ended() -> None:
    roster = joined(2)
    roster.disconnected(1)
    [send] = roster.received(8, hello(member(1)), 0.0)
    assert told([send]) == "rank 1 (host h1, pid 71) is gone: its connection broke"
    roster = joined(1)
    roster.received(0, Leave(), 0.0)
    assert roster.received(8, hello(Member.server(0)), 0.0) == [Send((8,), End())]


# --- failures ---


def test_the_first_failure_counts_and_is_told_to_every_member() -> None:
    roster = joined(2)
    roster.received(8, hello(Member.server(0)), 0.0)
    error = to_record(PeerLost("rank 9 is gone"))
    assert roster.received(1, ReportFailure(error), 0.0) == [Send((0, 1, 8), Failed(error))]
    assert roster.received(0, ReportFailure(to_record(PeerLost("another"))), 0.0) == []
    assert roster.disconnected(1) == []
    assert roster.tick(1000.0) == []


def test_a_member_that_disconnects_is_lost_even_after_it_left() -> None:
    roster = joined(2)
    roster.received(1, Leave(), 0.0)
    assert told(roster.disconnected(1)) == "rank 1 (host h1, pid 71) is gone: its connection broke"


def test_a_member_that_says_bye_before_the_end_is_lost_by_its_own_doing() -> None:
    roster = joined(2)
    assert (
        told(roster.received(1, Disconnect(), 0.0)) == "rank 1 (host h1, pid 71) is gone: it closed before all ranks had left"
    )
    assert roster.disconnected(1) == []


def test_the_most_silent_member_is_named() -> None:
    roster, now = joined(3), 0.0
    sends: list[Send] = []
    while not sends:
        now += 0.1
        roster.received(0, Heartbeat(), now)
        if now < 0.5:
            roster.received(1, Heartbeat(), now)
        sends = roster.tick(now)
    assert now < 12.0
    assert told(sends).startswith("rank 2 (host h2, pid 72) has been silent for ")


def test_of_several_that_are_given_up_together_the_most_silent_is_named() -> None:
    roster = joined(3)
    roster.tick(0.1)
    roster.received(1, Heartbeat(), 0.1)
    sends: list[Send] = []
    for now in (0.1 + 0.5 * tick for tick in range(1, 30)):
        roster.received(0, Heartbeat(), now)
        sends = sends or roster.tick(now)
    assert roster.given_up == {1, 2}
    assert told(sends).startswith("rank 2 (host h2, pid 72) has been silent for ")


@pytest.mark.parametrize("message", [Ready(""), Welcome("h", 1), hello(member(0)), Prepared({})])
def test_a_member_that_sends_what_is_not_its_to_send_fails_the_job(message: Message) -> None:
    roster = joined(2)
    assert told(roster.received(1, message, 0.0)).startswith("rank 1 (host h1, pid 71) ")


@pytest.mark.parametrize(
    "message", [Gather("t", "1"), Leave(), Propose({}), ToRank0("t", "1"), Announce("t", "1"), Prepared({})]
)
def test_a_server_cannot_act_as_a_rank_nor_a_rank_before_all_are_there(message: Message) -> None:
    expected = f"sent {type(message).__name__}, which it may not send now"
    roster = joined(1)
    roster.received(8, hello(Member.server(0)), 0.0)
    assert expected in told(roster.received(8, message, 0.0))
    roster = new_roster(2)
    roster.received(0, hello(member(0)), 0.0)
    assert expected in told(roster.received(0, message, 0.0))


def test_garbage_of_a_member_names_it() -> None:
    assert told(joined(2).invalid_message(1, ProtocolError("3 bytes"))) == "rank 1 (host h1, pid 71) sent 3 bytes"


def test_a_ping_is_answered_with_rank_0s_time() -> None:
    assert joined(2).received(1, Ping(3.0), 17.0) == [Send((1,), Pong(3.0, 17.0))]


# --- gathers and leaving ---


def test_what_all_ranks_gave_goes_to_all_ranks_together_and_a_tag_is_forgotten_after() -> None:
    roster = joined(2)
    roster.received(8, hello(Member.server(0)), 0.0)
    assert roster.received(1, Gather("t", '"b"'), 0.0) == []
    assert roster.received(0, Gather("t", '"a"'), 0.0) == [Send((0, 1), GatherPart("t", ((1, '"a"'), (1, '"b"'))))]
    assert roster._gathers == {}


def test_equal_values_of_neighbours_travel_once() -> None:
    roster = joined(4)
    for rank, value in ((3, "1"), (0, "1"), (2, "2")):
        assert roster.received(rank, Gather("t", value), 0.0) == []
    sends = roster.received(1, Gather("t", "1"), 0.0)
    assert sends == [Send((0, 1, 2, 3), GatherPart("t", ((2, "1"), (1, "2"), (1, "1"))))]


def test_large_values_travel_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "_MAX_OF_A_PART", 10)
    roster = joined(5)
    for rank, value in enumerate(("a" * 99, "b" * 6, "c" * 4, "d")):
        roster.received(rank, Gather("t", value), 0.0)
    parts = [send.message.runs for send in roster.received(4, Gather("t", "d"), 0.0)]
    assert parts == [((1, "a" * 99),), ((1, "b" * 6), (1, "c" * 4)), ((2, "d"),)]


def test_ranks_that_gather_for_different_purposes_are_told_instead_of_waiting_for_ever() -> None:
    roster = joined(2)
    assert roster.received(0, Gather("gather 11", "1"), 0.0) == []
    assert roster.received(0, Gather("gather 12, to make a model", "1"), 0.0) == []
    roster.received(1, Gather("gather 11", "1"), 0.0)
    assert told(roster.received(1, Gather("gather 12, to enter a Join", "1"), 0.0)) == (
        "rank 0 waits for all ranks to make a model, and rank 1 to enter a Join: all ranks must make these calls in the same "
        "order"
    )


def test_who_waits_long_for_a_gather_may_ask_for_whom() -> None:
    roster = joined(5)
    for rank in (0, 2):
        roster.received(rank, Gather("t", "1"), 0.0)
    assert roster.received(2, AskMissing("t"), 0.0) == [Send((2,), Missing("t", {1: 1, 3: 4}))]
    for rank in (1, 3, 4):
        roster.received(rank, Gather("t", "1"), 0.0)
    assert roster.received(2, AskMissing("t"), 0.0) == []


def test_giving_twice_is_refused() -> None:
    roster = joined(2)
    roster.received(1, Gather("t", "1"), 0.0)
    assert told(roster.received(1, Gather("t", "1"), 0.0)) == "rank 1 (host h1, pid 71) contributed to 't' twice"


def test_giving_after_leaving_is_refused() -> None:
    roster = joined(2)
    roster.received(1, Leave(), 0.0)
    assert told(roster.received(1, Gather("t", "1"), 0.0)) == "rank 1 (host h1, pid 71) contributed to 't' after it left"


@pytest.mark.parametrize("leave_first", [True, False])
def test_a_gather_with_a_leaver_fails_and_names_it_and_the_tag(leave_first: bool) -> None:
    roster = joined(2)
    events: list[tuple[int, Message]] = [(1, Leave()), (0, Gather("t", "1"))]
    sends = [roster.received(*event, 0.0) for event in (events if leave_first else events[::-1])]
    assert told(sends[1]) == "rank 1 (host h1, pid 71) left, but 't' waits for it"


def test_a_rank_may_leave_after_it_gave() -> None:
    roster = joined(2)
    roster.received(1, Gather("t", "1"), 0.0)
    assert roster.received(1, Leave(), 0.0) == []
    assert roster.received(0, Gather("t", "1"), 0.0) == [Send((0, 1), GatherPart("t", ((2, "1"),)))]


def test_when_the_last_leaves_all_are_told_the_end() -> None:
    roster = joined(2)
    roster.received(8, hello(Member.server(0)), 0.0)
    assert roster.received(1, Leave(), 0.0) == []
    assert not roster.over
    assert roster.received(0, Leave(), 0.0) == [Send((0, 1, 8), Left({0: 1})), Send((0, 1, 8), End())]
    assert roster.ended
    assert roster.disconnected(1) == []


def test_those_that_left_between_two_ticks_are_told_of_together_and_once() -> None:
    roster = joined(6)
    for rank in (4, 1, 2):
        assert roster.received(rank, Leave(), 0.0) == []
    assert roster.tick(0.1) == [Send((0, 1, 2, 3, 4, 5), Left({1: 2, 4: 4}))]
    assert roster.tick(0.2) == []
    roster.received(0, Leave(), 0.2)
    assert roster.received(8, hello(Member.server(0)), 0.2) == [
        Send((0, 1, 2, 3, 4, 5), Left({0: 0})),
        Send((8,), Welcome("h", 70)),
        Send((8,), Ready("")),
        Send((8,), Left({0: 2, 4: 4})),
    ]
    assert roster.tick(0.3) == []


def test_a_rank_that_left_may_end_once_every_other_has_left_or_spares_it() -> None:
    roster = joined(4)
    roster.received(1, Leave(), 0.0)
    left = Send((0, 1, 2, 3), Left({1: 1}))  # a rank knows who left before it is asked to let go
    assert roster.received(1, Part(), 0.0) == [left, Send((0, 2, 3), Parting(1))]
    assert roster.received(2, Released(1), 0.0) == []
    assert roster.received(3, Leave(), 0.0) == []
    assert roster.received(0, Released(1), 0.0) == [Send((1,), End())]
    roster.runs(1)  # its witness was asked before
    assert roster.tick(0.5) == [Send((0, 1, 2, 3), Left({3: 3}))]
    for now in range(1, 60):
        for connection in (0, 2, 3):
            roster.received(connection, Heartbeat(), now)
        assert roster.tick(now) == []
    assert roster.received(1, Disconnect(), 0.0) == roster.received(1, Heartbeat(), 0.0) == roster.disconnected(1) == []
    assert not roster.over
    assert told(roster.received(0, Gather("t", "1"), 0.0)) == "rank 1 left, but 't' waits for it"


def test_a_rank_that_is_let_go_need_not_promise_steps() -> None:
    roster = joined(3)
    assert roster.received(0, Propose({"credit": 1}, {}), 0.0) == [Send((0, 1, 2), Prepare())]
    roster.received(1, Leave(), 0.0)
    roster.received(1, Part(), 0.0)
    roster.received(0, Prepared({0: 3}), 0.0)
    roster.received(2, Prepared({0: 4}), 0.0)
    roster.received(0, Released(1), 0.0)
    assert roster.received(2, Released(1), 0.0) == [
        Send((1,), End()),
        Send((0, 2), Commit({"credit": 1}, {0: 4}, {})),
    ]
    assert roster.received(0, Propose({"credit": 2}, {}), 0.0) == [Send((0, 2), Prepare())]


def test_the_last_to_leave_lets_go_of_who_would_end() -> None:
    roster = joined(3)
    roster.received(1, Leave(), 0.0)
    roster.received(1, Part(), 0.0)
    assert roster.received(2, Leave(), 0.0) == []
    assert roster.received(2, Part(), 0.0) == [Send((0, 1, 2), Left({2: 2})), Send((0,), Parting(2))]
    assert roster.received(0, Released(2), 0.0) == [Send((2,), End())]
    assert roster.received(0, Leave(), 0.0) == [Send((0, 1, 2), Left({0: 0})), Send((0, 1, 2), End())]


def test_when_rank_0_may_end_the_channel_does() -> None:
    roster = joined(3)
    roster.received(8, hello(Member.server(0)), 0.0)
    roster.received(0, Leave(), 0.0)
    assert roster.received(0, Part(), 0.0) == [Send((0, 1, 2, 8), Left({0: 0})), Send((1, 2), Parting(0))]
    roster.received(1, Released(0), 0.0)
    assert roster.received(2, Released(0), 0.0) == [Send((0, 1, 2, 8), End())]
    assert roster.over
    assert roster.disconnected(0) == []


@pytest.mark.parametrize("left", [True, False])
def test_a_rank_may_ask_to_end_once_and_after_it_left(left: bool) -> None:
    roster = joined(2)
    if left:
        roster.received(1, Leave(), 0.0)
        roster.received(1, Part(), 0.0)
    said = told(roster.received(1, Part(), 0.0))
    assert said == "rank 1 (host h1, pid 71) asked to part, but has not left, or asked before"


def test_a_rank_that_comes_again_while_the_others_are_not_done_is_turned_away_without_harm() -> None:
    roster = joined(2)
    roster.received(1, Leave(), 0.0)
    roster.received(1, Part(), 0.0)
    roster.received(0, Released(1), 0.0)
    roster.disconnected(1)
    assert roster.received(9, hello(member(1)), 0.0) == [Send((9,), End())]
    assert not roster.over


# --- to rank 0 and from it ---


def test_what_a_rank_tells_goes_to_rank_0_only_with_its_sender() -> None:
    roster = joined(3)
    roster.received(8, hello(Member.server(0)), 0.0)
    assert roster.received(2, ToRank0("t", "[1]"), 0.0) == [Send((0,), FromRank(2, "t", "[1]"))]


def test_what_rank_0_announces_goes_to_all_other_ranks_that_have_not_left() -> None:
    roster = new_roster(4)
    for rank in (2, 0, 3, 1):
        roster.received(10 + rank, hello(member(rank, 4)), 0.0)
    roster.received(8, hello(Member.server(0)), 0.0)
    assert roster.received(10, Announce("t", "[1]"), 0.0) == [Send((11, 12, 13), Announced("t", "[1]"))]
    roster.received(12, Leave(), 0.0)
    assert roster.received(10, Announce("t", "[2]"), 0.0) == [Send((11, 13), Announced("t", "[2]"))]
    assert roster.received(10, Announce("t", "[3]", (0, 2, 3)), 0.0) == [Send((13,), Announced("t", "[3]"))]
    assert roster.received(10, Announce("t", "[4]", (2, 9)), 0.0) == []
    assert joined(1).received(0, Announce("t", "[1]"), 0.0) == []


def test_rank_0_is_told_and_announces_even_after_it_left() -> None:
    roster = joined(2)
    roster.received(0, Leave(), 0.0)
    assert roster.received(1, ToRank0("t", "1"), 0.0) == [Send((0,), FromRank(1, "t", "1"))]
    assert roster.received(0, Announce("t", "1"), 0.0) == [Send((1,), Announced("t", "1"))]


@pytest.mark.parametrize(
    ("rank", "leave_first", "sent", "expected"),
    [
        (1, False, Announce("t", "1"), "rank 1 (host h1, pid 71) announced something; only rank 0 may"),
        (0, False, ToRank0("t", "1"), "rank 0 (host h0, pid 70) sent itself a message"),
        (1, True, ToRank0("t", "1"), "rank 1 (host h1, pid 71) sent rank 0 a message after it left"),
    ],
)
def test_who_may_not_tell_or_announce_fails_the_job(rank: int, leave_first: bool, sent: Message, expected: str) -> None:
    roster = joined(2)
    if leave_first:
        roster.received(rank, Leave(), 0.0)
    assert told(roster.received(rank, sent, 0.0)) == expected


# --- agreeing on a step ---


def test_every_group_gets_the_largest_promise() -> None:
    assert first_common_steps([{0: 5, 1: 2}, {1: 4, 0: 4, 2: 9}]) == {0: 5, 1: 4, 2: 9}


def test_a_rank_that_does_not_know_a_group_promises_its_step_1() -> None:
    assert first_common_steps([{0: 5, 1: 0}, {0: 6}]) == {0: 6, 1: 1}


def test_proposals_are_handled_one_after_another() -> None:
    roster = joined(2)
    assert roster.received(0, Propose({"p": 1}), 0.0) == [Send((0, 1), Prepare())]
    assert roster.received(1, Propose({"p": 2}), 0.0) == []
    assert roster.received(1, Prepared({0: 4}), 0.0) == []
    assert roster.received(0, Prepared({0: 6}), 0.0) == [Send((0, 1), Commit({"p": 1}, {0: 6})), Send((0, 1), Prepare())]
    roster.received(0, Prepared({0: 8}), 0.0)
    assert roster.received(1, Prepared({0: 7}), 0.0) == [Send((0, 1), Commit({"p": 2}, {0: 8}))]


def test_a_rank_that_has_left_is_not_asked() -> None:
    roster = joined(2)
    roster.received(1, Leave(), 0.0)
    assert roster.received(0, Propose({}), 0.0) == [Send((0,), Prepare())]


def test_a_promise_nobody_asked_for_fails_the_job() -> None:
    roster = joined(2)
    roster.received(0, Propose({}), 0.0)
    roster.received(1, Prepared({}), 0.0)
    assert told(roster.received(1, Prepared({}), 0.0)) == "rank 1 (host h1, pid 71) promised steps that nobody asked for"


class SteppingRank:
    """A rank that steps whenever it may, as Core does, with messages to and from the server still on their way."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.next_step = 0
        self.held_from: int | None = None
        self.switches: list[tuple[int, Any]] = []
        self.used: list[Any] = []  # the configuration of each step begun
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Message] = deque()

    def begin_step(self, slowest: int) -> None:
        """Averaging keeps ranks within a step of each other; a hold stops a rank."""
        if self.next_step > slowest or (self.held_from is not None and self.next_step >= self.held_from):
            return
        self.used.append(next((config for step, config in reversed(self.switches) if step <= self.next_step), None))
        self.next_step += 1

    def take(self) -> None:
        match self.inbox.popleft():
            case Prepare():
                assert self.held_from is None
                self.held_from = self.next_step + 1
                self.outbox.append(Prepared({0: self.held_from}))
            case Commit(config, steps):
                assert self.held_from is not None
                assert steps[0] >= self.held_from >= self.next_step, "told of a step below its promise"
                self.held_from = None
                self.switches.append((steps[0], config["number"]))


@settings(max_examples=200)
@given(st.integers(1, 4), st.data())
def test_ranks_use_one_configuration_in_every_step_however_proposals_race_with_steps(n: int, data: st.DataObject) -> None:
    roster, ranks = joined(n), [SteppingRank(rank) for rank in range(n)]
    proposals = 0

    def deliver(sends: list[Send]) -> None:
        for send in sends:
            for connection in send.connections:
                ranks[connection].inbox.append(send.message)

    def move(rank: SteppingRank, what: str) -> None:
        if what == "step":
            rank.begin_step(min(other.next_step for other in ranks))
        elif what == "take" and rank.inbox:
            rank.take()
        elif what == "send" and rank.outbox:
            deliver(roster.received(rank.rank, rank.outbox.popleft(), 0.0))

    moves = st.tuples(st.sampled_from(ranks), st.sampled_from(["step", "take", "send", "propose"]))
    for rank, what in data.draw(st.lists(moves, max_size=80)):
        if what == "propose" and proposals < 5:
            proposals += 1
            rank.outbox.append(Propose({"number": proposals}))
        move(rank, what)
    while any(rank.inbox or rank.outbox for rank in ranks):
        for rank in ranks:
            for what in ("send", "take", "step"):
                move(rank, what)
    for _ in range(5):  # nobody is held for ever
        for rank in ranks:
            rank.begin_step(min(other.next_step for other in ranks))

    assert not roster.over
    assert [rank.switches for rank in ranks] == [ranks[0].switches] * n
    assert len(ranks[0].switches) == proposals
    shortest = min(len(rank.used) for rank in ranks)
    assert [rank.used[:shortest] for rank in ranks] == [ranks[0].used[:shortest]] * n
    assert proposals == 0 or ranks[0].used[-1] == ranks[0].switches[-1][1]
