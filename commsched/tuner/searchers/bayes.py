"""Bayesian optimisation: the next trial is the configuration with the greatest expected improvement."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from statistics import median
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...core.errors import ConfigError, error_text
from ...core.scheduler import SchedulerConfig
from ..space import Space
from ..trials import Stopped, Window
from . import Candidate, Searcher, StepModel

FloatArray = NDArray[np.float64]

#: Weights of the model's prediction, with their prior probabilities.
_TRUSTS = {1.0: 0.5, 0.5: 0.3, 0.0: 0.2}

#: Hyperparameters as logarithms: the values on a grid, the prior mean, the prior deviation. After a dozen noisy trials the
#: likelihood alone has its maximum at absurd values, and finding it (L-BFGS from several starts) takes longer than this grid.
_AMPLITUDE = ([math.log(s) for s in (0.02, 0.05, 0.12, 0.3, 0.7)], math.log(0.2), 1.0)
_LENGTH = ([math.log(s) for s in (0.08, 0.15, 0.3, 0.6, 1.2)], math.log(0.3), 0.8)
_NOISE = ([math.log(s) for s in (0.002, 0.006, 0.02, 0.06)], math.log(0.006), 1.0)

#: Standard deviation of the process's unknown mean; any value much larger than the differences between configurations will do.
_OFFSET = 1.0


class Surrogate:
    """A regression fitted to trials. It gives the mean and the expected improvement at any point.

    log(seconds) = a constant + trust * log(model's seconds) + a process (Matern 5/2, a length for each coordinate) + noise.
    The trust is 1, 1/2 or 0; each value is weighted by how well it explains the trials. A correct model saves trials. A model
    that the trials contradict loses its weight, as fast as their number and noise allow. Kernels are scikit-optimize's. Its
    regressor is not used, because it starts BLAS threads for matrices of a dozen rows, which then spin for a while beside the
    training.

    Args:
        points: points of the trials in the unit cube, shape (trials, dimensions).
        shape: the model's log(seconds) at these points, shape (trials,); None if there is no model.
        log_seconds: measured log(seconds) of the trials, shape (trials,).
        deviations: standard errors of ``log_seconds``, shape (trials,); noise beyond them is fitted.

    Raises:
        ImportError: scikit-optimize is not installed.
    """

    def __init__(self, points: FloatArray, shape: FloatArray | None, log_seconds: FloatArray, deviations: FloatArray) -> None:
        trusts = _TRUSTS if shape is not None else {0.0: 1.0}
        shape = np.zeros(len(points)) if shape is None else shape
        self._fits = [_Fit(trust, points, shape, log_seconds, deviations) for trust in trusts]
        logs = np.array([fit.log_evidence + math.log(prior) for fit, prior in zip(self._fits, trusts.values())])
        weights = np.exp(logs - logs.max())
        self._weights: FloatArray = weights / weights.sum()

    def mean(self, points: FloatArray, shape: FloatArray | None) -> FloatArray:
        """Expected log(seconds) without noise, shape (points,)."""
        means = [fit.predict(points, shape)[0] for fit in self._fits]
        return np.asarray(np.average(means, axis=0, weights=self._weights))

    def improvement(self, points: FloatArray, shape: FloatArray | None, best: float) -> FloatArray:
        """Expected improvement of log(seconds) on ``best``, never negative, shape (points,)."""
        gains = [_expected_improvement(*fit.predict(points, shape), best) for fit in self._fits]
        return np.asarray(np.average(gains, axis=0, weights=self._weights))


class _Fit:
    """One process, with one trust in the model."""

    def __init__(
        self, trust: float, points: FloatArray, shape: FloatArray, log_seconds: FloatArray, deviations: FloatArray
    ) -> None:
        from skopt.learning.gaussian_process.kernels import ConstantKernel, Matern

        dimensions = points.shape[1]
        self._trust = trust
        self._points = points
        rest = log_seconds - trust * shape
        self._centre = float(np.average(rest, weights=1 / (deviations + 0.01) ** 2))
        self._rest: FloatArray = rest - self._centre
        self._deviations = deviations
        self._kernel: Any = ConstantKernel(_OFFSET**2, "fixed") + ConstantKernel() * Matern([1.0] * dimensions, nu=2.5)
        self._hold([_AMPLITUDE, *[_LENGTH] * dimensions, _NOISE])

    def _hold(self, choices: Sequence[tuple[Sequence[float], float, float]]) -> None:
        """Set the most probable hyperparameters of the grid. They are optimized one after the other until none changes."""
        best = [values[len(values) // 2] for values, _, _ in choices]
        highest = self._log_probability(best, choices)
        before = -math.inf
        while before < highest:
            before = highest
            for place, (values, _, _) in enumerate(choices):
                for value in values:
                    logs = [*best[:place], value, *best[place + 1 :]]
                    if (found := self._log_probability(logs, choices)) > highest:
                        best, highest = logs, found
        self.log_evidence = highest
        self._kernel, covariance = self._covariance(best)
        self._inverse: FloatArray = np.asarray(np.linalg.inv(covariance), np.float64)

    def _log_probability(self, logs: Sequence[float], choices: Sequence[tuple[Sequence[float], float, float]]) -> float:
        """Log probability of the trials and of the hyperparameters ``logs`` (logarithms of amplitude, lengths and noise), up to
        a constant."""
        prior = sum(((x - expected) / spread) ** 2 / 2 for x, (_, expected, spread) in zip(logs, choices))
        _, covariance = self._covariance(logs)
        fit = self._rest @ np.linalg.solve(covariance, self._rest) / 2
        return float(-fit - np.linalg.slogdet(covariance)[1] / 2 - prior)

    def _covariance(self, logs: Sequence[float]) -> tuple[Any, FloatArray]:
        amplitude, *lengths, noise = logs
        kernel = self._kernel.clone_with_theta(np.array([2 * amplitude, *lengths]))  # the kernel's parameter is a variance
        return kernel, kernel(self._points) + np.diag(self._deviations**2 + math.exp(2 * noise))

    def predict(self, points: FloatArray, shape: FloatArray | None) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation of log(seconds) without noise."""
        across = self._kernel(points, self._points)
        gain = across @ self._inverse
        mean = self._centre + gain @ self._rest + (0.0 if shape is None else self._trust * shape)
        variance = self._kernel.diag(points) - np.einsum("ij,ij->i", gain, across)
        return mean, np.sqrt(np.maximum(variance, 1e-12))


def _expected_improvement(mean: FloatArray, deviation: FloatArray, best: float) -> FloatArray:
    """Same as ``skopt.acquisition.gaussian_ei``, which is not used because it changes the warning filters of all threads."""
    z = (best - mean) / deviation
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([math.erfc(-x / math.sqrt(2)) / 2 for x in z])
    gains: FloatArray = np.maximum(deviation * (z * below + density), 0.0)
    return gains


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


class Bayes(Searcher):
    """Proposes the incumbent, the seeds and the model's fastest configuration. If these are too few for the surrogate, it then
    proposes configurations that lie far apart. After that it proposes the configuration with the greatest expected improvement
    on the tried configuration with the lowest expected time; because of noise, this need not be the one with the fastest
    window. Except for the incumbent and the seeds, proposals are from a lattice of two values per octave, because times are
    flat around their minimum. A model that raises an error is not used again."""

    def __init__(self, space: Space, random_seed: int, seeds: Sequence[SchedulerConfig], model: StepModel | None) -> None:
        try:
            import skopt.learning.gaussian_process.kernels  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"tune_by='bayes' needs scikit-optimize: pip install \"commsched[tune]\" ({error})") from error
        super().__init__()
        self._space = space
        self._seeds = [space.clip(config) for config in seeds]
        self._lattice = space.lattice(per_octave=2)
        self._shuffled = Random(random_seed).sample(self._lattice, len(self._lattice))
        self._model = None if model is None else _Model(model, space)
        self._fitted: Surrogate | None = None  # to all trials so far

    def tell(self, config: SchedulerConfig, window: Window | None) -> None:
        super().tell(config, window)
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
        trials = [(each, median(window.seconds for window in found)) for each, found in self._tried.items() if found]
        if len(trials) == _CALIBRATED_BY:
            self._model = self._model.calibrate(trials)

    def _ask(self) -> Candidate | None:
        if self._space.incumbent not in self._tried:
            return Candidate(self._space.incumbent)
        known = {self._space.to_point(config) for config in self._tried}
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
        succeeded = [config for config, windows in self._tried.items() if windows]
        if len(succeeded) < 2 or self._space.dimensions == 0:
            return super().best()
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
            rows = [(config, *observed) for config in self._tried for observed in self._observed(config)]
            configs, seconds, deviations = zip(*rows)
            self._fitted = Surrogate(*self._places(configs), np.log(seconds), np.array(deviations))
        return self._fitted

    def _observed(self, config: SchedulerConfig) -> list[tuple[float, float]]:
        """Seconds of each trial of ``config``, with the standard deviation of their logarithm."""
        if windows := self._tried[config]:
            return [(window.seconds, _deviation(window)) for window in windows]
        slow = self._seconds(config)
        return [] if slow is None else [(slow, _UNKNOWN_DEVIATION)]

    def _places(self, configs: Sequence[SchedulerConfig]) -> tuple[FloatArray, FloatArray | None]:
        points = np.array([self._space.to_point(config) for config in configs])
        return points, None if self._model is None else self._model.shape(configs)


def _deviation(window: Window) -> float:
    part = window.error_seconds / window.seconds
    return max(part, _MIN_DEVIATION) if 0 <= part < math.inf else _UNKNOWN_DEVIATION


class _ModelBroke(Exception):
    """The model raised an error; the message names it."""


@contextmanager
def _naming_errors() -> Iterator[None]:
    """Turns every error but Stopped into a _ModelBroke."""
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        raise _ModelBroke(error_text(error)) from error


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
        with _naming_errors():
            return _Model(self._model.calibrate(trials), self._space, calibrated=True)

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
                with _naming_errors():
                    self._known[config] = self._model.predict(config)
        usable = [math.log(seconds) for seconds in self._known.values() if 0 < seconds < math.inf]
        slowest = max(usable, default=0.0)
        seconds = [self._known[config] for config in configs]
        return np.array([math.log(s) if 0 < s < math.inf else slowest for s in seconds])
