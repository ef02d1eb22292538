"""Searches over earlier measurements: each trial draws a window for its configuration; nothing is trained. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from commsched.core.config import SchedulerConfig
from commsched.settings import Budget
from commsched.tuner.result import Verdict
from commsched.tuner.search_run import SearchRun
from commsched.tuner.searchers import Searcher
from commsched.tuner.trials import Window

from .surface import Surface


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
        assert named is not None, "a searcher that was told a time has a best one"
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
