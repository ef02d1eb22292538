"""Searches over what was measured before: each trial draws a window for its configuration, and nothing is trained. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from commsched.core.config import Budget, SchedulerConfig
from commsched.tuner.trial import Searcher, Window
from commsched.tuner.tuning import Tuning
from commsched.tuner.verdict import Verdict

from .surface import Surface


@dataclass(frozen=True)
class Cost:
    """``settle`` steps go by uncounted after each change of configuration; then ``steps`` are one trial's. Before the first
    trial ``beforehand`` steps of the default configuration are needed."""

    settle: int
    steps: int
    beforehand: int = 0

    def beforehand_seconds(self, surface: Surface, incumbent: SchedulerConfig) -> float:
        """Of training, before the first trial."""
        return self.beforehand * surface.seconds[surface.nearest(incumbent)]


@dataclass(frozen=True)
class Point:
    """After ``trial`` trials, in which ``seconds`` of training have passed, the search would name ``named``; see
    ``Surface.regret``."""

    trial: int
    seconds: float
    named: SchedulerConfig
    regret: float


def search(surface: Surface, searcher: Searcher, incumbent: SchedulerConfig, trials: int, cost: Cost, seed: int) -> list[Point]:
    """One point for each trial. Fewer than ``trials`` if the searcher ends by itself: what it names then stays.

    Raises:
        ValueError: the searcher asks for nothing at all.
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
    """The first from which on the regret stays at most ``within``: a lucky guess that is given up again does not count. None:
    not in the end."""
    found = None
    for point in reversed(points):
        if point.regret > within:
            break
        found = point
    return found


def tune(surface: Surface, searcher: Searcher, incumbent: SchedulerConfig, budget: Budget, cost: Cost, seed: int) -> Verdict:
    """The whole of tuning as it is done online, with windows as long as there (``cost.steps`` does not count), early end and
    comparison. Its seconds are of training, without those beforehand."""
    chance = random.Random(seed)
    clock = 0.0

    def measure(config: SchedulerConfig, steps: int) -> Window:
        nonlocal clock
        window = surface.draw(config, steps, chance)
        clock += (cost.settle + steps) * window.seconds
        return window

    tuning = Tuning(
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
