"""The search that ByteScheduler's authors published with it, for comparison.

Source: Y. Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019, and their
code. The search has 15 points of 100 steps each. The first 10 are random; the others maximize expected improvement with a
margin of 0.1. Coordinates are linear in the sizes.
"""

from __future__ import annotations

import warnings

import numpy as np

from commsched.core.config import SchedulerConfig
from commsched.tuner.searchers import Candidate, Searcher
from commsched.tuner.space import Space
from commsched.tuner.trials import Window

POINTS = 15
STEPS = 100
#: A point is applied this many steps after it was chosen.
SETTLE = 10

_RANDOM_POINTS = 10
_MARGIN_SECONDS = 0.1
_CANDIDATES = 2000


class PaperSearch(Searcher):
    """The published search; see ``Searcher``. Sizes are within the bounds of ``space``, because the authors' bounds are
    for unscaled models."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._chance = np.random.default_rng(seed)
        self._told: list[tuple[SchedulerConfig, float]] = []
        lattice = space.lattice()
        self._low = np.array([min(each.partition_bytes for each in lattice), min(each.credit_bytes for each in lattice)])
        self._high = np.array([max(each.partition_bytes for each in lattice), max(each.credit_bytes for each in lattice)])

    def ask(self) -> Candidate | None:
        if len(self._told) >= POINTS:
            return None
        points = self._chance.random((1 if len(self._told) < _RANDOM_POINTS else _CANDIDATES, 2))
        point = points[0] if len(points) == 1 else points[np.argmax(self._improvement(points))]
        partition, credit = (self._low + point * (self._high - self._low)).round().astype(int).tolist()
        return Candidate(self._space.clip(SchedulerConfig(partition, max(partition, credit), self._space.incumbent.policy)))

    def tell(self, config: SchedulerConfig, window: Window | None) -> None:
        if window is None:
            raise ValueError("what is replayed does not fail")
        self._told.append((config, window.seconds))

    def best(self) -> SchedulerConfig | None:
        return min(self._told, key=lambda each: each[1])[0] if self._told else None

    def _improvement(self, points: np.ndarray) -> np.ndarray:
        """Expected improvement in seconds, beyond the margin, on the fastest point so far."""
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern
        from skopt.acquisition import gaussian_ei

        sizes = np.array([[config.partition_bytes, config.credit_bytes] for config, _ in self._told])
        seconds = np.array([seconds for _, seconds in self._told])
        process = GaussianProcessRegressor(Matern(nu=2.5), alpha=1e-6, normalize_y=True, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that the kernel's best length is at a bound
            process.fit((sizes - self._low) / (self._high - self._low), seconds)
            return np.asarray(gaussian_ei(points, process, y_opt=seconds.min(), xi=_MARGIN_SECONDS))
