"""Bayesian optimisation: the next trial is the configuration with the greatest expected improvement."""

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
from ..observations import Observations
from ..space import Space
from ..surrogate import FloatArray, Surrogate
from ..trial import Candidate, Searcher, StepModel, Stopped, Window

USES_MODEL = True

log = logging.getLogger("commsched")

T = TypeVar("T")

#: Least relative error assumed for a window: two windows of one configuration differ by more than smaller errors suggest.
_MIN_DEVIATION = 0.002

#: Relative error of a window without a valid error, and of a failed trial. A failed trial counts as slow as the slowest
#: successful one.
_UNKNOWN_DEVIATION = 0.1

#: The surrogate is used from this many tried configurations on, plus the number of coordinates.
_FEWEST_TRIALS = 2

#: Trials before that stay this far from the bounds of the unit cube, where most models are slow.
_MARGIN = 0.15

#: Number of random candidates for each such trial.
_DRAWN = 24

#: Relative difference of step times that a model cannot resolve.
_SAME = 0.002

#: Number of measured configurations that calibrate the model. It is calibrated only once, because its whole lattice is then
#: simulated anew. The incumbent alone cannot separate rate and overhead. The number was chosen on grids of one model, vgg16 at
#: two rates.
_CALIBRATED_BY = 4


class Bayes:
    """Proposes the incumbent, the seeds and the model's fastest configuration. If these are too few for the surrogate, it then
    proposes configurations that lie far apart. After that it proposes the configuration with the greatest expected improvement
    on the tried configuration with the lowest expected time; because of noise, this need not be the one with the fastest
    window. Except for the incumbent and the seeds, proposals are from a lattice of two values per octave, because times are
    flat around their minimum. A model that raises an error is not used again."""

    def __init__(self, space: Space, seeds: Sequence[SchedulerConfig], model: StepModel | None, random_seed: int) -> None:
        self._space = space
        self._seeds = [space.clip(config) for config in seeds]
        self._lattice = space.lattice(per_octave=2)
        self._shuffled = Random(random_seed).sample(self._lattice, len(self._lattice))
        self._model = None if model is None else _Model(model, space)
        self._tried = Observations()
        self._fitted: Surrogate | None = None  # to all trials so far

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
        """The configuration farthest from all known points, among some drawn at random."""

        def is_inside(config: SchedulerConfig) -> bool:
            return all(_MARGIN <= x <= 1 - _MARGIN for x in self._space.to_point(config))

        drawn = [config for config in untried if is_inside(config)][:_DRAWN] or untried[:_DRAWN]
        return max(drawn, key=lambda config: min(math.dist(self._space.to_point(config), point) for point in known))

    def _most_promising(self, untried: Sequence[SchedulerConfig]) -> Candidate | None:
        best = self._best()
        if best is None:
            return None  # no trial has succeeded, so nothing can be inferred
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
        """Seconds of each trial of ``config``, with the standard deviation of their logarithm."""
        if windows := self._tried.windows(config):
            return [(window.seconds, _deviation(window)) for window in windows]
        slow = self._tried.seconds(config)
        return [] if slow is None else [(slow, _UNKNOWN_DEVIATION)]

    def _places(self, configs: Sequence[SchedulerConfig]) -> tuple[FloatArray, FloatArray | None]:
        points = np.array([self._space.to_point(config) for config in configs])
        return points, None if self._model is None else self._model.shape(configs)


def _deviation(window: Window) -> float:
    part = window.error_seconds / window.seconds
    return max(part, _MIN_DEVIATION) if 0 <= part < math.inf else _UNKNOWN_DEVIATION


class _ModelBroke(Exception):
    """The model raised an error; the message names it."""


class _Model:
    """A model's log(seconds). Each configuration is predicted once. Every error of the model except Stopped becomes a
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
        """The configuration nearest to the incumbent among those that no other beats by a measurable amount; None if the model
        cannot predict it."""
        shape = self.shape(self._lattice)
        near = self._lattice[int((shape < shape.min() + _SAME).argmax())]
        return near if 0 < self._known[near] < math.inf else None

    def shape(self, configs: Sequence[SchedulerConfig]) -> FloatArray:
        """Predicted log(seconds) of each configuration, shape (configs,)."""
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
