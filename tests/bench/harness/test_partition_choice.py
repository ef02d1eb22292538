"""None"""

from __future__ import annotations

import pytest

from bench.harness.averaging import ConfigBarrier
from bench.harness.measure import LayerTimes
from bench.harness.partition_choice import MAX_BYTES, MIN_BYTES, MessageCost, choose, measure_message_cost, slope
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
            return measure_message_cost(session, ConfigBarrier(session), 64_000)

    first, second = run_world(2, rank)
    assert first == second
    assert first.link_seconds >= 0
    assert first.cpu_seconds >= 0


LAYERS = LayerTimes(["a", "b"], [0.1, 0.1], [0.2, 0.2], [30_000_000, 30_000_000], [[30_000_000], [30_000_000]])
COST = MessageCost(link_seconds=4e-5, cpu_seconds=6e-5)
PER_BYTE = 1e-8  # 0.6 s for all: rho is 1


def test_what_is_given_is_taken():
    assert choose("1MB", "3MB", [LAYERS], PER_BYTE, COST, 2, 0) == (1_000_000, 3_000_000)
    assert choose("1MB", "auto", [LAYERS], PER_BYTE, COST, 2, 0) == (1_000_000, 4_000_000)
    assert choose("1MB", "auto", [LAYERS], PER_BYTE, COST, 4, 0) == (1_000_000, 8_000_000)


def test_auto_balances_messages_against_preemption():
    partition, credit = choose("auto", "auto", [LAYERS] * 2, PER_BYTE, COST, 2, 0)
    assert partition == pytest.approx((1e-4 * 60e6 / (4 * PER_BYTE)) ** 0.5, abs=1)
    assert credit == 4 * partition


def test_auto_stays_within_bounds():
    assert choose("auto", "auto", [LAYERS], PER_BYTE, MessageCost(0.0, 0.0), 2, 0)[0] == MIN_BYTES
    assert choose("auto", "auto", [LAYERS], PER_BYTE, MessageCost(1.0, 0.0), 2, 0)[0] == MAX_BYTES


def test_auto_is_the_median_of_what_suits_the_ranks():
    small = LayerTimes(["a"], [0.1], [0.2], [1_000_000], [[1_000_000]])
    assert choose("auto", "9MB", [small, LAYERS, LAYERS], PER_BYTE, COST, 2, 0) == choose(
        "auto", "9MB", [LAYERS], PER_BYTE, COST, 2, 0
    )


def test_separate_servers_get_smaller_partitions_and_more_credit():
    embedded, _ = choose("auto", "auto", [LAYERS], PER_BYTE, COST, 2, 0)
    partition, credit = choose("auto", "auto", [LAYERS], PER_BYTE, COST, 2, 2)
    assert partition == pytest.approx(embedded / 2**0.5, abs=1)  # twice as many are on their way
    assert credit == 16 * partition


def test_collectives_are_few_at_a_time_whatever_the_number_of_ranks():
    two = choose("auto", "auto", [LAYERS], PER_BYTE, COST, 2, 0, True)
    assert two == choose("auto", "auto", [LAYERS], PER_BYTE, COST, 8, 0, True)
    partition, credit = two
    assert credit == 4 * partition
    assert choose("1MB", "auto", [LAYERS], PER_BYTE, COST, 8, 0, True) == (1_000_000, 4_000_000)
