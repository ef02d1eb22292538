"""The cost of a partition."""

from __future__ import annotations

import pytest

from bench.harness.averaging import ConfigBarrier
from bench.harness.message_cost import measure_message_seconds, slope
from commsched.session.local import local_sessions
from commsched.testing.world import run_world

COUNTS = (2, 4, 8, 16, 32, 64)


def test_the_slope_is_what_each_partition_adds():
    assert slope({count: 0.05 + 30e-6 * count + 0.01 / count for count in COUNTS}) == pytest.approx(30e-6)


def test_the_last_partition_on_its_own_is_no_cost_of_messages():
    assert slope({count: 0.05 + 0.05 / count for count in COUNTS}) == pytest.approx(0, abs=1e-12)


def test_a_slope_is_never_negative():
    assert slope({count: 0.05 - 1e-6 * count for count in COUNTS}) == 0


def test_every_rank_gets_the_same_cost():
    sessions = local_sessions(2)

    def rank(number):
        with sessions[number] as session:
            return measure_message_seconds(session, ConfigBarrier(session), 64_000)

    first, second = run_world(2, rank)
    assert first == second
    assert first >= 0
