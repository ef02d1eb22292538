"""Failure detection and the clock offset, on times that the test makes up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.control.liveness import ClockOffset, FailureDetector, heartbeat_seconds, tick_seconds, too_silent
from commsched.control.messages import Member


def watch(liveness: FailureDetector[str], begin: float, end: float, speaking: set[str]) -> list[tuple[str, float]]:
    """Ticks and heartbeats as they come, from ``begin`` to ``end``; who was given up."""
    overdue, now = [], begin
    while now < end:
        now += tick_seconds(10.0)
        overdue += liveness.tick(now)
        for peer in speaking:
            liveness.heard(peer)
    return overdue


def test_a_silent_peer_is_given_up_once_and_within_two_seconds_after_fail_after() -> None:
    liveness: FailureDetector[str] = FailureDetector(10.0, now=0.0)
    for peer in ("silent", "speaking"):
        liveness.heard(peer)
    [(peer, silence)] = watch(liveness, 0.0, 12.0, {"speaking"})
    assert peer == "silent"
    assert 10.0 < silence < 12.0
    assert watch(liveness, 12.0, 40.0, {"speaking"}) == []


def test_a_pause_of_less_than_fail_after_is_forgiven() -> None:
    liveness: FailureDetector[str] = FailureDetector(10.0, now=0.0)
    liveness.heard("a")
    assert watch(liveness, 0.0, 10.0 + heartbeat_seconds(10.0), set()) == []  # its last beat came an interval before


def test_a_pause_of_our_own_is_not_held_against_peers() -> None:
    liveness: FailureDetector[str] = FailureDetector(10.0, now=0.0)
    liveness.heard("a")
    assert liveness.tick(1000.0) == []
    assert watch(liveness, 1000.0, 1009.0, set()) == []


def test_a_forgotten_peer_is_not_given_up() -> None:
    liveness: FailureDetector[str] = FailureDetector(10.0, now=0.0)
    liveness.heard("a")
    liveness.forget("a")
    assert watch(liveness, 0.0, 30.0, set()) == []


def test_the_message_names_the_peer_and_the_seconds() -> None:
    error = too_silent(Member("rank", 3, 4, "h", 5), 11.23, 10.0)
    assert str(error) == "rank 3 (host h, pid 5) has been silent for 11.2 s; fail_after is 10 s"
    assert (error.rank, error.server) == (3, None)
    assert too_silent(Member("server", 2, 0, "h", 5), 11.23, 10.0).server == 2


delays = st.floats(0.0, 1.0)


@given(st.floats(-1e4, 1e4), st.lists(st.tuples(delays, delays), min_size=1, max_size=8))
def test_the_error_is_at_most_half_of_the_fastest_round_trip(offset: float, ways: list[tuple[float, float]]) -> None:
    clock, now = ClockOffset(), 100.0
    for there, back in ways:
        clock.add(now, now + there + offset, now + there + back)
        now += 10
    fastest = min(there + back for there, back in ways)
    assert abs(clock.seconds - offset) <= fastest / 2 + 1e-9
    assert clock.round_trips == len(ways)


def test_the_fastest_round_trip_wins() -> None:
    clock = ClockOffset()
    clock.add(0.0, 57.0, 10.0)
    clock.add(20.0, 70.5, 21.0)
    clock.add(30.0, 83.0, 39.0)
    assert clock.seconds == pytest.approx(50.0)
