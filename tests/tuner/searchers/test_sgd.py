from __future__ import annotations

import math

import pytest

from commsched.core.errors import ConfigError
from commsched.core.scheduler import SchedulerConfig
from commsched.tuner.searchers import make_searcher
from commsched.tuner.space import Space

from .surfaces import SLOW_NETWORK, search


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
