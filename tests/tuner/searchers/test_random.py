from __future__ import annotations

from commsched.core.scheduler import SchedulerConfig
from commsched.tuner.searchers import make_searcher
from commsched.tuner.space import Space

from .surfaces import SLOW_NETWORK, search


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
