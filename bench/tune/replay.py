"""Searches over earlier measurements: each trial draws a window for its configuration; nothing is trained. Pure."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from commsched import SchedulerConfig
from commsched.settings import Budget
from commsched.tuner.result import Verdict
from commsched.tuner.search_run import SearchRun
from commsched.tuner.searchers import Candidate, Searcher
from commsched.tuner.space import Space
from commsched.tuner.trials import Window

from .case import Surface


@dataclass(frozen=True)
class Cost:
    """The cost of a search in steps. After each change of configuration ``settle`` steps do not count; then a trial takes
    ``steps``. Before the first trial the search needs ``beforehand`` steps of the default configuration."""

    settle: int
    steps: int
    beforehand: int = 0

    def beforehand_seconds(self, surface: Surface, incumbent: SchedulerConfig) -> float:
        """Training time before the first trial."""
        return self.beforehand * surface.seconds[surface.nearest(incumbent)]


@dataclass(frozen=True)
class Point:
    """A point of a search's progress: after ``trial`` trials, which took ``seconds`` of training, it would name ``named`` as
    the best configuration; see ``Surface.regret``."""

    trial: int
    seconds: float
    named: SchedulerConfig
    regret: float


def search(surface: Surface, searcher: Searcher, incumbent: SchedulerConfig, trials: int, cost: Cost, seed: int) -> list[Point]:
    """One point for each trial. There are fewer than ``trials`` points if the searcher ends early; its last named configuration
    then stays.

    Raises:
        ValueError: the searcher does not propose any configuration.
    """
    chance = random.Random(seed)
    points: list[Point] = []
    seconds = cost.beforehand_seconds(surface, incumbent)
    while len(points) < trials and (candidate := searcher.ask()) is not None:
        window = surface.draw(candidate.config, cost.steps, chance)
        searcher.tell(candidate.config, window)
        seconds += (cost.settle + cost.steps) * window.seconds
        named = searcher.best()
        assert named is not None, "a searcher that got a time has a best configuration"
        points.append(Point(len(points) + 1, seconds, named, surface.regret(named)))
    if not points:
        raise ValueError("a search that asks for nothing cannot be replayed")
    return points


def reached(points: Sequence[Point], within: float) -> Point | None:
    """The first point from which on the regret stays at most ``within``; None if the last regret is greater. A lucky guess that
    is given up again does not count."""
    found = None
    for point in reversed(points):
        if point.regret > within:
            break
        found = point
    return found


def tune(surface: Surface, searcher: Searcher, incumbent: SchedulerConfig, budget: Budget, cost: Cost, seed: int) -> Verdict:
    """A complete tuning run as online, with windows of the online length (``cost.steps`` does not count), early end and
    comparison. Its seconds are training time, without the steps before the first trial."""
    chance = random.Random(seed)
    clock = 0.0

    def measure(config: SchedulerConfig, steps: int) -> Window:
        nonlocal clock
        window = surface.draw(config, steps, chance)
        clock += (cost.settle + steps) * window.seconds
        return window

    tuning = SearchRun(
        incumbent,
        searcher,
        measure,
        budget,
        apply=lambda config: None,
        say=lambda sentence: None,
        settle_steps=cost.settle,
        clock=lambda: clock,
    )
    return tuning.run()


PAPER_POINTS = 15
PAPER_STEPS = 100
#: A point is applied this many steps after it was chosen.
PAPER_SETTLE = 10

_RANDOM_POINTS = 10
_MARGIN_SECONDS = 0.1
_CANDIDATES = 2000


class PaperSearch(Searcher):
    """The search that ByteScheduler's authors published with it, for comparison; see ``Searcher``.

    Source: Y. Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019, and their
    code. The search has 15 points of 100 steps each. The first 10 are random; the others maximize expected improvement with a
    margin of 0.1. Coordinates are linear in the sizes. Sizes are within the bounds of ``space``, because the authors' bounds
    are for unscaled models.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._chance = np.random.default_rng(seed)
        self._measured: list[tuple[SchedulerConfig, float]] = []
        lattice = space.lattice()
        self._low = np.array([min(each.partition_bytes for each in lattice), min(each.credit_bytes for each in lattice)])
        self._high = np.array([max(each.partition_bytes for each in lattice), max(each.credit_bytes for each in lattice)])

    def ask(self) -> Candidate | None:
        if len(self._measured) >= PAPER_POINTS:
            return None
        points = self._chance.random((1 if len(self._measured) < _RANDOM_POINTS else _CANDIDATES, 2))
        point = points[0] if len(points) == 1 else points[np.argmax(self._improvement(points))]
        partition, credit = (self._low + point * (self._high - self._low)).round().astype(int).tolist()
        return Candidate(self._space.clip(SchedulerConfig(partition, max(partition, credit), self._space.incumbent.policy)))

    def tell(self, config: SchedulerConfig, window: Window | None) -> None:
        if window is None:
            raise ValueError("what is replayed does not fail")
        self._measured.append((config, window.seconds))

    def best(self) -> SchedulerConfig | None:
        return min(self._measured, key=lambda each: each[1])[0] if self._measured else None

    def _improvement(self, points: np.ndarray) -> np.ndarray:
        """Expected improvement in seconds, beyond the margin, on the fastest point so far."""
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern
        from skopt.acquisition import gaussian_ei

        sizes = np.array([[config.partition_bytes, config.credit_bytes] for config, _ in self._measured])
        seconds = np.array([seconds for _, seconds in self._measured])
        process = GaussianProcessRegressor(Matern(nu=2.5), alpha=1e-6, normalize_y=True, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that the kernel's best length is at a bound
            process.fit((sizes - self._low) / (self._high - self._low), seconds)
            return np.asarray(gaussian_ei(points, process, y_opt=seconds.min(), xi=_MARGIN_SECONDS))
