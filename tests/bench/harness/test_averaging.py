"""None"""

from __future__ import annotations

import pytest

from bench.harness import averaging
from bench.harness.averaging import ConfigBarrier, average, register
from commsched.core.errors import TransportError
from commsched.core.scheduler import SchedulerConfig
from commsched.session.local import local_sessions
from commsched.testing.world import run_world

WANTED = SchedulerConfig(4000, 8000, "fifo", 1)


def run_ranks(rank_main, world_size=3):
    sessions = local_sessions(world_size)

    def rank(number):
        with sessions[number] as session:
            return rank_main(session)

    return run_world(world_size, rank)


def test_all_ranks_have_the_configuration_when_it_returns():
    def rank_main(session):
        barrier = ConfigBarrier(session)
        _, group = register(session, "gradients", 40_000)
        average(group)
        seen = []
        for config in (WANTED, WANTED, SchedulerConfig(), WANTED):
            barrier.switch(config)
            seen.append(session.core.config)
            average(group)
            average(group)
            seen.append(len(group.plan.partitions))
        return seen

    one_time = [WANTED, 10, WANTED, 10, SchedulerConfig(), 1, WANTED, 10]
    assert run_ranks(rank_main) == [one_time] * 3


def test_a_switch_that_does_not_happen_is_said(monkeypatch):
    monkeypatch.setattr(averaging, "_SWITCH_SECONDS", 0.0)

    def rank_main(session):
        monkeypatch.setattr(session, "reconfigure", lambda config: None)
        ConfigBarrier(session).switch(WANTED)

    with pytest.raises(
        TransportError, match=r"rank \d runs SchedulerConfig\(.*, and not SchedulerConfig\(partition_bytes=4000"
    ):
        run_ranks(rank_main)
