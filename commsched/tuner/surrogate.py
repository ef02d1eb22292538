"""What is believed of log(seconds) after a few trials: a Gaussian process around a model's shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: How much of the model's shape is believed, and how likely that is before any trial.
_TRUSTS = {1.0: 0.5, 0.5: 0.3, 0.0: 0.2}

#: Hyperparameters as logarithms: values tried; the expected one; its spread. After a dozen noisy trials the
#: likelihood alone has its maximum at absurd ones, and finding it (L-BFGS from several starts) takes longer than this grid.
_AMPLITUDE = ([math.log(s) for s in (0.02, 0.05, 0.12, 0.3, 0.7)], math.log(0.2), 1.0)
_LENGTH = ([math.log(s) for s in (0.08, 0.15, 0.3, 0.6, 1.2)], math.log(0.3), 0.8)
_NOISE = ([math.log(s) for s in (0.002, 0.006, 0.02, 0.06)], math.log(0.006), 1.0)

#: Standard deviation of the process's unknown mean; anything much larger than what configurations differ by.
_OFFSET = 1.0


class Surrogate:
    """Fitted to trials; then tells mean, deviation and expected improvement anywhere.

    log(seconds) = a constant + trust * log(model's seconds) + a process (Matern 5/2, a length for each coordinate) + noise,
    where trust is 1, 1/2 or 0, weighted by how well each explains the trials: a model that is right saves trials, one whose
    shape the trials contradict loses its weight, as fast as their number and noise let that be told. Kernels are
    scikit-optimize's; its regressor is not used, as that starts BLAS threads for matrices of a dozen rows, which then spin for
    a while beside the training.

    Args:
        points: trials' places in the unit cube, shape (trials, dimensions).
        shape: the model's log(seconds) there, shape (trials,); None: there is no model.
        log_seconds: what they took, shape (trials,).
        deviations: standard errors of that, shape (trials,); noise beyond them is fitted.

    Raises:
        ImportError: scikit-optimize is not installed.
    """

    def __init__(self, points: Floats, shape: Floats | None, log_seconds: Floats, deviations: Floats) -> None:
        trusts = _TRUSTS if shape is not None else {0.0: 1.0}
        shape = np.zeros(len(points)) if shape is None else shape
        self._fits = [_Fit(trust, points, shape, log_seconds, deviations) for trust in trusts]
        logs = np.array([fit.log_evidence + math.log(prior) for fit, prior in zip(self._fits, trusts.values())])
        weights = np.exp(logs - logs.max())
        self._weights: Floats = weights / weights.sum()

    def mean(self, points: Floats, shape: Floats | None) -> Floats:
        """Expected log(seconds) without noise, shape (points,)."""
        means = [fit.predict(points, shape)[0] for fit in self._fits]
        return np.asarray(np.average(means, axis=0, weights=self._weights))

    def improvement(self, points: Floats, shape: Floats | None, best: float) -> Floats:
        """By how much log(seconds) is expected to be below ``best``, never negative, shape (points,)."""
        gains = [_expected_improvement(*fit.predict(points, shape), best) for fit in self._fits]
        return np.asarray(np.average(gains, axis=0, weights=self._weights))


class _Fit:
    """One process, around one part of the model's shape."""

    def __init__(self, trust: float, points: Floats, shape: Floats, log_seconds: Floats, deviations: Floats) -> None:
        from skopt.learning.gaussian_process.kernels import ConstantKernel, Matern

        dimensions = points.shape[1]
        self._trust = trust
        self._points = points
        rest = log_seconds - trust * shape
        self._centre = float(np.average(rest, weights=1 / (deviations + 0.01) ** 2))
        self._rest: Floats = rest - self._centre
        self._deviations = deviations
        self._kernel: Any = ConstantKernel(_OFFSET**2, "fixed") + ConstantKernel() * Matern([1.0] * dimensions, nu=2.5)
        self._hold([_AMPLITUDE, *[_LENGTH] * dimensions, _NOISE])

    def _hold(self, choices: Sequence[tuple[Sequence[float], float, float]]) -> None:
        """Find the most probable hyperparameters of the grid, one after the other, until none changes."""
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
        self._inverse: Floats = np.asarray(np.linalg.inv(covariance), np.float64)

    def _log_probability(self, logs: Sequence[float], choices: Sequence[tuple[Sequence[float], float, float]]) -> float:
        """Of the trials and of these logarithms of amplitude, lengths and noise, up to a constant."""
        prior = sum(((x - expected) / spread) ** 2 / 2 for x, (_, expected, spread) in zip(logs, choices))
        _, covariance = self._covariance(logs)
        fit = self._rest @ np.linalg.solve(covariance, self._rest) / 2
        return float(-fit - np.linalg.slogdet(covariance)[1] / 2 - prior)

    def _covariance(self, logs: Sequence[float]) -> tuple[Any, Floats]:
        amplitude, *lengths, noise = logs
        kernel = self._kernel.clone_with_theta(np.array([2 * amplitude, *lengths]))  # which keeps a variance
        return kernel, kernel(self._points) + np.diag(self._deviations**2 + math.exp(2 * noise))

    def predict(self, points: Floats, shape: Floats | None) -> tuple[Floats, Floats]:
        """Mean and standard deviation of log(seconds) without noise."""
        across = self._kernel(points, self._points)
        gain = across @ self._inverse
        mean = self._centre + gain @ self._rest + (0.0 if shape is None else self._trust * shape)
        variance = self._kernel.diag(points) - np.einsum("ij,ij->i", gain, across)
        return mean, np.sqrt(np.maximum(variance, 1e-12))


def _expected_improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    """As ``skopt.acquisition.gaussian_ei``, which changes the filters of warnings for all threads."""
    z = (best - mean) / deviation
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([math.erfc(-x / math.sqrt(2)) / 2 for x in z])
    gains: Floats = np.maximum(deviation * (z * below + density), 0.0)
    return gains
