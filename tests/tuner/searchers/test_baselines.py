from __future__ import annotations

import math

import pytest

from commsched.core.errors import ConfigError
from commsched.core.scheduler import SchedulerConfig
from commsched.tuner.searchers import make_searcher
from commsched.tuner.space import Space

from .surfaces import SLOW_NETWORK, search

# --- grid ---


def test_it_asks_for_the_whole_lattice_and_then_for_nothing() -> None:
    space = SLOW_NETWORK.space
    searcher = make_searcher("grid", space)
    asked = search(searcher, SLOW_NETWORK, trials=1000)
    assert sorted(asked, key=str) == sorted(space.lattice(per_octave=1), key=str)
    assert searcher.ask() is None
    assert searcher.best() == min(asked, key=SLOW_NETWORK)


def test_coarse_comes_before_fine() -> None:
    space = Space(SchedulerConfig(), 10**10, frozenset({"credit"}))
    asked = search(make_searcher("grid", space), lambda config: 1.0, trials=1000)
    sizes = [config.partition_bytes // 125_000 for config in asked]
    assert sizes == [32, 16, 4, 128, 2, 8, 64, 256, 1]  # the incumbent, the middle of 1..256, those of its halves, the rest


def test_nine_trials_span_partition_and_credit() -> None:
    space = Space(SchedulerConfig(2_000_000, 16_000_000), 10**10)  # the middle of the lattice
    asked = search(make_searcher("grid", space), lambda config: 1.0, trials=9)
    assert {config.partition_bytes for config in asked} == {500_000, 2_000_000, 16_000_000}
    assert {config.credit_bytes // config.partition_bytes for config in asked} == {2, 8, 32}


# --- random ---


def test_it_draws_evenly_from_the_whole_space() -> None:
    space = Space(SchedulerConfig(), 10**10, policies=("priority", "fifo"))
    asked = search(make_searcher("random", space, random_seed=1), lambda config: 1.0, trials=1001)
    points = [space.to_point(config) for config in asked[1:]]
    for coordinate in zip(*points):
        for quarter in range(4) if len(set(coordinate)) > 2 else (1, 3):  # policies lie at 1/4 and 3/4
            low = quarter / 4 if len(set(coordinate)) > 2 else quarter / 4 - 0.1
            share = sum(low <= x < low + 0.25 for x in coordinate) / len(points)
            assert abs(share - (0.25 if len(set(coordinate)) > 2 else 0.5)) < 0.05


def test_another_seed_draws_others() -> None:
    space = SLOW_NETWORK.space
    first, other = (search(make_searcher("random", space, random_seed=seed), SLOW_NETWORK, trials=10) for seed in (1, 2))
    assert set(first) & set(other) == {space.incumbent}


def test_a_small_space_comes_to_an_end() -> None:
    space = Space(SchedulerConfig(), 10**9, frozenset({"partition", "credit"}), ("priority", "fifo"))
    asked = search(make_searcher("random", space), lambda config: 1.0, trials=10)
    assert sorted(config.policy for config in asked) == ["fifo", "priority"]


# --- sgd ---


def test_without_noise_it_goes_down_to_the_minimum_and_stops() -> None:
    space = Space(SchedulerConfig(), 10**10)
    middle = (0.35, 0.7)

    def seconds(config: SchedulerConfig) -> float:
        return math.exp(2 * math.dist(space.to_point(config), middle) ** 2)

    searcher = make_searcher("sgd", space)
    asked = search(searcher, seconds, trials=200)
    assert len(asked) < 100
    assert searcher.ask() is None
    best = searcher.best()
    assert best is not None
    assert math.dist(space.to_point(best), middle) < 0.08


def test_it_measures_a_slope_along_each_coordinate_before_it_moves() -> None:
    space = SLOW_NETWORK.space
    asked = search(make_searcher("sgd", space), SLOW_NETWORK, trials=4)
    start, partition, credit, moved = map(space.to_point, asked)
    assert math.isclose(partition[0] - start[0], 0.12, abs_tol=1e-3)
    assert math.isclose(partition[1], start[1], abs_tol=1e-3)
    assert math.isclose(credit[0], start[0], abs_tol=1e-3)
    assert math.isclose(credit[1] - start[1], 0.12, abs_tol=1e-3)
    assert SLOW_NETWORK(asked[3]) < SLOW_NETWORK(asked[0])
    assert all(abs(x - y) <= 0.251 for x, y in zip(moved, start))


def test_it_stays_within_bounds_where_the_minimum_lies_on_one() -> None:
    space = Space(SchedulerConfig(), 10**10, frozenset({"credit"}))
    searcher = make_searcher("sgd", space)
    asked = search(searcher, lambda config: float(config.partition_bytes), trials=100)
    best = searcher.best()
    assert best is not None
    assert best.partition_bytes == min(config.partition_bytes for config in asked) == 64_000
    assert searcher.ask() is None


def test_it_refuses_to_choose_among_policies_alone() -> None:
    space = Space(SchedulerConfig(), 10**9, frozenset({"partition", "credit"}), ("priority", "fifo"))
    with pytest.raises(ConfigError, match="tune_by='sgd' follows slopes, and policies have none; only the policy is free"):
        make_searcher("sgd", space)
