"""Bayesian optimisation: after each trial, what promises most improvement on average."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from typing import TypeVar

import numpy as np

from ...core.config import SchedulerConfig
from ...core.errors import ConfigError
from ..space import Space
from ..surrogate import Floats, Surrogate
from ..trial import Candidate, Searcher, StepModel, Stopped, Window
from ..tried import Tried

USES_MODEL = True

log = logging.getLogger("commsched")

T = TypeVar("T")

#: Below this a window's own error is not believed: two windows of one configuration differ by more.
_LEAST_DEVIATION = 0.002

#: Where a window does not say its error; and of a trial that failed, which counts as slow as the slowest that did not.
_UNKNOWN_DEVIATION = 0.1

#: Nothing is inferred from fewer trials than coordinates and these.
_FEWEST_TRIALS = 2

#: What is tried to have as many keeps this far from the bounds of the unit cube, where most models are slow.
_MARGIN = 0.15

#: How many are drawn for each such trial.
_DRAWN = 24

#: A part of a model's step times that it cannot know.
_SAME = 0.002

#: So many configurations that were measured calibrate the model, once: each time, its whole lattice is simulated anew. By the
#: incumbent alone, rate and overhead cannot be told apart. The number was chosen on grids of one model, vgg16 at two rates.
_CALIBRATED_BY = 4


class Bayes:
    """Asks for the incumbent, the seeds, the model's best, where these are few for some that lie far apart, then for the
    greatest expected improvement on the tried configuration that is believed to be the fastest: noise makes it another than
    that of the luckiest window. Apart from incumbent and seeds it asks for what is in a lattice of two values per octave,
    since times are flat around their minimum. A model that raises an error is not asked again."""

    def __init__(self, space: Space, seeds: Sequence[SchedulerConfig], model: StepModel | None, random_seed: int) -> None:
        self._space = space
        self._seeds = [space.clip(config) for config in seeds]
        self._lattice = space.lattice(per_octave=2)
        self._shuffled = Random(random_seed).sample(self._lattice, len(self._lattice))
        self._model = None if model is None else _Model(model, space)
        self._tried = Tried()
        self._fitted: Surrogate | None = None  # to all that was told

    def tell(self, config: SchedulerConfig, window: Window | None) -> None:
        self._tried.add(config, window)
        self._fitted = None
        self._without_a_broken_model(self._calibrate)

    def ask(self) -> Candidate | None:
        return self._without_a_broken_model(self._ask)

    def best(self) -> SchedulerConfig | None:
        return self._without_a_broken_model(self._best)

    def _without_a_broken_model(self, do: Callable[[], T]) -> T:
        try:
            return do()
        except _ModelBroke as error:
            log.warning("tuning goes on without its model: %s", error)
            self._model = self._fitted = None
            return do()

    def _calibrate(self) -> None:
        if self._model is None or self._model.calibrated:
            return
        windows = [(each, self._tried.windows(each)) for each in self._tried.configs]
        trials = [(each, median(window.seconds for window in found)) for each, found in windows if found]
        if len(trials) == _CALIBRATED_BY:
            self._model = self._model.calibrate(trials)

    def _ask(self) -> Candidate | None:
        if self._space.incumbent not in self._tried:
            return Candidate(self._space.incumbent)
        known = {self._space.to_point(config) for config in self._tried.configs}
        fastest = None if self._model is None else self._model.fastest
        early = [config for config in (*self._seeds, fastest) if config is not None]
        if config := next((config for config in early if self._space.to_point(config) not in known), None):
            return Candidate(config)
        untried = [config for config in self._shuffled if self._space.to_point(config) not in known]
        if not untried:
            return None
        if len(known) < self._space.dimensions + _FEWEST_TRIALS:
            return Candidate(self._far_from(known, untried))
        return self._most_promising(untried)

    def _best(self) -> SchedulerConfig | None:
        succeeded = [config for config in self._tried.configs if self._tried.windows(config)]
        if len(succeeded) < 2 or self._space.dimensions == 0:
            return self._tried.best()
        return succeeded[int(self._surrogate().mean(*self._places(succeeded)).argmin())]

    def _far_from(self, known: set[tuple[float, ...]], untried: Sequence[SchedulerConfig]) -> SchedulerConfig:
        """Of some drawn at random, the one farthest from everything known."""

        def is_inside(config: SchedulerConfig) -> bool:
            return all(_MARGIN <= x <= 1 - _MARGIN for x in self._space.to_point(config))

        drawn = [config for config in untried if is_inside(config)][:_DRAWN] or untried[:_DRAWN]
        return max(drawn, key=lambda config: min(math.dist(self._space.to_point(config), point) for point in known))

    def _most_promising(self, untried: Sequence[SchedulerConfig]) -> Candidate | None:
        best = self._best()
        if best is None:
            return None  # nothing works: there is nothing to infer from
        lowest = float(self._surrogate().mean(*self._places([best]))[0])
        gains = self._surrogate().improvement(*self._places(untried), lowest)
        return Candidate(untried[int(gains.argmax())], float(gains.max()))

    def _surrogate(self) -> Surrogate:
        if self._fitted is None:
            rows = [(config, *observed) for config in self._tried.configs for observed in self._observed(config)]
            configs, seconds, deviations = zip(*rows)
            self._fitted = Surrogate(*self._places(configs), np.log(seconds), np.array(deviations))
        return self._fitted

    def _observed(self, config: SchedulerConfig) -> list[tuple[float, float]]:
        """Seconds, and the standard deviation of their logarithm, for each trial of it."""
        if windows := self._tried.windows(config):
            return [(window.seconds, _deviation(window)) for window in windows]
        slow = self._tried.seconds(config)
        return [] if slow is None else [(slow, _UNKNOWN_DEVIATION)]

    def _places(self, configs: Sequence[SchedulerConfig]) -> tuple[Floats, Floats | None]:
        points = np.array([self._space.to_point(config) for config in configs])
        return points, None if self._model is None else self._model.shape(configs)


def _deviation(window: Window) -> float:
    part = window.error_seconds / window.seconds
    return max(part, _LEAST_DEVIATION) if 0 <= part < math.inf else _UNKNOWN_DEVIATION


class _ModelBroke(Exception):
    """Says how."""


class _Model:
    """A model's log(seconds), each configuration asked for once. Whatever the model raises but Stopped becomes a
    _ModelBroke."""

    def __init__(self, model: StepModel, space: Space, calibrated: bool = False) -> None:
        self._model = model
        self._space = space
        self.calibrated = calibrated
        start = space.to_point(space.incumbent)
        self._lattice = sorted(space.lattice(per_octave=2), key=lambda config: math.dist(space.to_point(config), start))
        self._known: dict[SchedulerConfig, float] = {}

    def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> _Model:
        try:
            return _Model(self._model.calibrate(trials), self._space, calibrated=True)
        except Stopped:
            raise
        except Exception as error:
            raise _ModelBroke(f"{type(error).__name__}: {error}") from error

    @property
    def fastest(self) -> SchedulerConfig | None:
        """The one nearest to the incumbent of those that nothing beats by a measurable part; None: the model cannot tell."""
        shape = self.shape(self._lattice)
        near = self._lattice[int((shape < shape.min() + _SAME).argmax())]
        return near if 0 < self._known[near] < math.inf else None

    def shape(self, configs: Sequence[SchedulerConfig]) -> Floats:
        """Shape (configs,)."""
        for config in configs:
            if config not in self._known:
                self._known[config] = self._predict(config)
        usable = [math.log(seconds) for seconds in self._known.values() if 0 < seconds < math.inf]
        slowest = max(usable, default=0.0)
        seconds = [self._known[config] for config in configs]
        return np.array([math.log(s) if 0 < s < math.inf else slowest for s in seconds])

    def _predict(self, config: SchedulerConfig) -> float:
        try:
            return self._model.predict(config)
        except Stopped:
            raise
        except Exception as error:
            raise _ModelBroke(f"{type(error).__name__}: {error}") from error


def make_searcher(space: Space, seeds: Sequence[SchedulerConfig], model: StepModel | None, random_seed: int) -> Searcher:
    try:
        import skopt.learning.gaussian_process.kernels  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"tune_by='bayes' needs scikit-optimize: pip install \"commsched[tune]\" ({error})") from error
    return Bayes(space, seeds, model, random_seed)
