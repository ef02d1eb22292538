"""A surrogate of log(seconds) after a few trials: a Gaussian process around a model's prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
