"""What rank 0 does for a job grows with the number of ranks, and not with its square."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from commsched.control.liveness import heartbeat_seconds
from commsched.control.messages import Announce, Gather, Leave, Message, Prepared, Propose, ToRank0, encode
from commsched.control.roster import Send

from .test_roster import hello, joined, member, new_roster
from .virtual_job import VirtualJob


def life_of(size: int) -> dict[str, list[Send]]:
    """The messages of a job of ``size`` ranks, by what the ranks do."""
    roster, ranks = new_roster(size), range(size)
    told = {"join": [send for rank in ranks for send in roster.received(rank, hello(member(rank, size)), 0.0)]}

    def all_send(message: Message, first: int = 0) -> list[Send]:
        return [send for rank in ranks[first:] for send in roster.received(rank, message, 0.0)]

    told["gather"] = all_send(Gather("manifests", "x" * 1000))
    told["change"] = [*roster.received(0, Propose({}), 0.0), *all_send(Prepared({0: 5}))]
    told["launch"] = [*all_send(ToRank0("order", "[]"), first=1), *roster.received(0, Announce("order", "[]"), 0.0)]
    told["leave"] = [*all_send(Leave(), first=1), *roster.tick(0.1), *roster.received(0, Leave(), 0.1)]
    assert roster.ended
    return told


def test_the_messages_and_bytes_of_a_job_grow_with_its_ranks() -> None:
    small, large = life_of(256), life_of(4096)
    for what, sends in large.items():
        for count in (lambda send: len(send.connections), lambda send: len(send.connections) * len(encode(send.message))):
            assert sum(map(count, sends)) < 18 * sum(map(count, small[what])), what


def lines_run(call: Callable[[], object]) -> int:
    """The number of lines of Python that ``call`` runs, each turn of a loop counted."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # finalizers of what earlier tests left are no part of the call
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return lines


@pytest.mark.parametrize(
    "message", [Gather("t", "1"), ToRank0("t", "1"), Leave(), Prepared({0: 5})], ids=lambda message: type(message).__name__
)
def test_an_event_takes_as_long_among_many_ranks_as_among_few(message: Message) -> None:
    def lines(size: int) -> int:
        roster = joined(size)
        roster.received(0, Propose({}), 0.0)
        for rank in range(1, size // 2):
            roster.received(rank, message, 0.0)
        return lines_run(lambda: roster.received(size // 2, message, 0.0))

    assert lines(512) == lines(8)


def test_who_joins_takes_as_long_among_many_ranks_as_among_few() -> None:
    def lines(size: int) -> int:
        roster = new_roster(size)
        for rank in range(size // 2):
            roster.received(rank, hello(member(rank, size)), 0.0)
        return lines_run(lambda: roster.received(size, hello(member(size // 2, size)), 0.0))

    assert lines(512) == lines(8)


def test_a_job_of_4096_ranks_stays_within_its_budget_and_names_who_is_silent() -> None:
    job = VirtualJob(4096)
    assert job.roster.ready
    job.received = job.sent = 0
    assert job.pass_time(20.0) is None
    assert job.received <= 20 * 4096 / 2 * 1.05  # the interval is a fifth of fail_after
    assert job.sent == job.received
    began = job.now
    failed_at = job.pass_time(60.0, silent={4095})
    assert failed_at is not None
    assert str(job.roster.failure).startswith("rank 4095 (host h511, pid 4095) has been silent for")
    assert 10.0 < failed_at - began < 10.0 + 2 * job.interval


@pytest.mark.parametrize(("size", "most"), [(64, 128), (256, 256), (512, 256), (1024, 512)])
def test_heartbeats_grow_with_the_job_only_beyond_their_limit(size: int, most: int) -> None:
    assert size / heartbeat_seconds(10.0, size) <= most
    assert size / heartbeat_seconds(1000.0, size) <= 256
