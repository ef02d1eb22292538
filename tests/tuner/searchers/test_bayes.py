from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from commsched.core.scheduler import SchedulerConfig
from commsched.tuner.searchers import StepModel, make_searcher
from commsched.tuner.space import Space
from commsched.tuner.trials import Window

from .surfaces import FAST_NETWORK, LONG_ROUND_TRIP, SLOW_NETWORK, Fixed, Surface, search, tilted


def loss(surface: Surface, model: StepModel | None, *, noise: float, random_seed: int) -> float:
    """By what part the configuration found in 12 trials is truly slower than the best there is."""
    searcher = make_searcher("bayes", surface.space, model=model, random_seed=random_seed)
    search(searcher, surface, trials=12, noise=noise, random_seed=random_seed)
    best = searcher.best()
    assert best is not None
    return surface(best) / surface.lowest - 1


@pytest.mark.parametrize(
    ("surface", "model"),
    [
        (SLOW_NETWORK, None),
        (FAST_NETWORK, None),
        (LONG_ROUND_TRIP, None),
        (LONG_ROUND_TRIP, Fixed(LONG_ROUND_TRIP)),
        (FAST_NETWORK, tilted(FAST_NETWORK)),
        (LONG_ROUND_TRIP, tilted(LONG_ROUND_TRIP)),
    ],
    ids=["slow", "fast", "far", "far, right model", "fast, tilted model", "far, tilted model"],
)
def test_twelve_trials_find_what_is_within_three_percent_of_the_best(surface: Surface, model: StepModel | None) -> None:
    losses = [loss(surface, model, noise=0.01, random_seed=seed) for seed in range(2)]
    assert min(losses) < 0.03, losses
    assert max(losses) < 0.05, losses


def test_a_model_of_the_opposite_is_not_believed_for_long() -> None:
    assert loss(SLOW_NETWORK, Fixed(lambda config: 1 / SLOW_NETWORK(config)), noise=0.01, random_seed=0) < 0.05


def test_seeds_come_after_the_incumbent_then_the_models_best_then_what_promises_most() -> None:
    space = SLOW_NETWORK.space
    seeds = [SchedulerConfig(1_000_000, 2_000_000), space.incumbent, SchedulerConfig(10, 10), SchedulerConfig(64_000, 64_000)]
    searcher = make_searcher("bayes", space, seeds=seeds, model=Fixed(SLOW_NETWORK))
    asked = search(searcher, SLOW_NETWORK, trials=4)
    assert asked == [
        space.incumbent,
        seeds[0],
        SchedulerConfig(64_000, 64_000),  # two seeds are the same within the bounds
        asked[3],
    ]
    assert SLOW_NETWORK(asked[3]) < 1.002 * SLOW_NETWORK.lowest
    candidate = searcher.ask()
    assert candidate is not None
    assert candidate.expected_gain is not None


def test_without_a_model_a_few_far_apart_come_first() -> None:
    space = SLOW_NETWORK.space
    asked = search(make_searcher("bayes", space), SLOW_NETWORK, trials=4)
    points = [space.to_point(config) for config in asked]
    assert min(math.dist(a, b) for i, a in enumerate(points) for b in points[:i]) > 0.25
    assert all(0.15 <= x <= 0.85 for point in points[1:] for x in point)


def test_the_expected_gain_falls_as_the_best_is_approached() -> None:
    searcher = make_searcher("bayes", SLOW_NETWORK.space)
    search(searcher, SLOW_NETWORK, trials=4)
    early = searcher.ask()
    search(searcher, SLOW_NETWORK, trials=14)
    late = searcher.ask()
    assert early is not None
    assert late is not None
    assert early.expected_gain is not None
    assert late.expected_gain is not None
    assert 0 <= late.expected_gain < 0.005 < early.expected_gain


def test_one_lucky_window_does_not_make_a_configuration_the_best() -> None:
    """Its neighbours, and its other windows, say otherwise."""
    space = Space(SchedulerConfig(), 10**9, frozenset({"credit"}))
    searcher = make_searcher("bayes", space)
    configs = [space.from_point((x / 10,)) for x in range(11)]
    for place, config in enumerate(configs):
        seconds = 1 + 2 * (place / 10 - 0.3) ** 2
        searcher.tell(config, Window(seconds, 0.02 * seconds, 10))
    lucky = configs[9]
    searcher.tell(lucky, Window(0.95, 0.2, 10))
    assert searcher.best() in configs[2:5]


def test_a_window_with_a_small_error_counts_for_more() -> None:
    space = Space(SchedulerConfig(), 10**9, frozenset({"credit"}))
    for errors, best in (((0.001, 0.3), 0), ((0.3, 0.001), 1)):
        searcher = make_searcher("bayes", space)
        left, right = space.from_point((0.0,)), space.from_point((1.0,))
        searcher.tell(left, Window(1.0, errors[0], 10))
        searcher.tell(right, Window(1.0, errors[1], 10))
        searcher.tell(left, Window(1.2 if best else 0.9, errors[0], 10))
        searcher.tell(right, Window(0.9 if best else 1.2, errors[1], 10))
        assert searcher.best() == (left, right)[best]


def test_what_a_model_cannot_tell_counts_as_slow_and_is_asked_for_once() -> None:
    space = SLOW_NETWORK.space
    asked: list[SchedulerConfig] = []

    def predict(config: SchedulerConfig) -> float:
        asked.append(config)
        return math.nan if config.partition_bytes < 1_000_000 else SLOW_NETWORK(config)

    searcher = make_searcher("bayes", space, model=Fixed(predict))
    tried = search(searcher, SLOW_NETWORK, trials=3)
    told = [config for config in space.lattice(per_octave=2) if config.partition_bytes >= 1_000_000]
    assert SLOW_NETWORK(tried[1]) < 1.002 * min(map(SLOW_NETWORK, told))
    assert searcher.best() is not None
    assert len(asked) == len(set(asked))


def test_a_model_is_calibrated_once_by_the_first_trials() -> None:
    """It takes the network for ten times as fast as it is, until then."""
    space, told = SLOW_NETWORK.space, []

    class Hopeful:
        def predict(self, config: SchedulerConfig) -> float:
            return LONG_ROUND_TRIP(config)

        def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> Fixed:
            told.append(list(trials))
            return Fixed(SLOW_NETWORK)

    searcher = make_searcher("bayes", space, model=Hopeful())
    searcher.tell(SchedulerConfig(1, 1), None)  # failed: it says nothing of the network
    tried = search(searcher, SLOW_NETWORK, trials=8)
    assert told == [[(config, SLOW_NETWORK(config)) for config in tried[:4]]]
    assert SLOW_NETWORK(tried[4]) < 1.002 * SLOW_NETWORK.lowest


@dataclass
class Breaking:
    """A model that predicts so often and then raises an error; of one that always does, the calibration."""

    predictions: float

    def predict(self, config: SchedulerConfig) -> float:
        self.predictions -= 1
        if self.predictions < 0:
            raise AssertionError("the rules deadlock")
        return SLOW_NETWORK(config)

    def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> StepModel:
        if self.predictions == math.inf:
            raise np.linalg.LinAlgError("SVD did not converge")
        return self


@pytest.mark.parametrize("predictions", [0, 5, math.inf])
def test_a_model_that_breaks_is_done_without(predictions: float, caplog: pytest.LogCaptureFixture) -> None:
    searcher = make_searcher("bayes", SLOW_NETWORK.space, model=Breaking(predictions))
    without = make_searcher("bayes", SLOW_NETWORK.space)
    asked = search(searcher, SLOW_NETWORK, trials=8)
    assert len(asked) == 8
    why = "LinAlgError: SVD did not converge" if predictions == math.inf else "AssertionError: the rules deadlock"
    assert [record.getMessage() for record in caplog.records] == [f"tuning goes on without its model: {why}"]
    for config in asked:
        without.tell(config, Window(SLOW_NETWORK(config), 0.0, 10))
    assert searcher.ask() == without.ask()
    assert searcher.best() == without.best()


def test_a_model_that_breaks_in_the_middle_of_a_question_leaves_no_half_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """It knows the lattice by then, before and after its calibration; what an earlier search has found lies beside that."""
    space = SLOW_NETWORK.space
    searcher = make_searcher("bayes", space, model=Breaking(2 * len(space.lattice(2))))
    without = make_searcher("bayes", space)
    asked = search(searcher, SLOW_NETWORK, trials=6)
    assert searcher.best() in asked
    assert caplog.records == []
    asked.append(SchedulerConfig(187_312, 1_236_000))
    searcher.tell(asked[-1], Window(SLOW_NETWORK(asked[-1]), 0.0, 10))
    for config in asked:
        without.tell(config, Window(SLOW_NETWORK(config), 0.0, 10))
    assert searcher.ask() == without.ask()
    assert searcher.best() == without.best()
    assert len(caplog.records) == 1


def test_a_model_that_can_tell_nothing_is_none() -> None:
    space = SLOW_NETWORK.space
    asked = search(make_searcher("bayes", space, model=Fixed(lambda config: math.inf)), SLOW_NETWORK, trials=4)
    assert asked == search(make_searcher("bayes", space), SLOW_NETWORK, trials=4)


def test_a_model_to_which_all_is_the_same_is_no_reason_to_begin_at_the_bounds() -> None:
    space = SLOW_NETWORK.space
    asked = search(make_searcher("bayes", space, model=Fixed(lambda config: 0.3)), SLOW_NETWORK, trials=4)
    assert all(0.15 <= x <= 0.85 for config in asked[1:] for x in space.to_point(config))


@pytest.mark.parametrize("error_seconds", [math.nan, math.inf, -1.0, 0.0])
def test_a_window_without_an_error_is_of_use(error_seconds: float) -> None:
    searcher = make_searcher("bayes", SLOW_NETWORK.space)
    for _ in range(8):
        candidate = searcher.ask()
        assert candidate is not None
        searcher.tell(candidate.config, Window(SLOW_NETWORK(candidate.config), error_seconds, 10))
    best = searcher.best()
    assert best is not None
    assert SLOW_NETWORK(best) < SLOW_NETWORK(SLOW_NETWORK.space.incumbent)


def test_it_ends_when_the_lattice_is_tried() -> None:
    space = Space(SchedulerConfig(), 200_000, frozenset({"credit"}))
    lattice = space.lattice(per_octave=2)
    assert 1 < len(lattice) < 8
    searcher = make_searcher("bayes", space)
    asked = search(searcher, lambda config: 1 + config.partition_bytes / 1e6, trials=20)
    assert sorted(map(space.to_point, asked)) == sorted(map(space.to_point, lattice))
    assert searcher.ask() is None
