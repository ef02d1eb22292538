"""Searchers: each proposes the next configuration to try, from the results of the trials so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from ...core.scheduler import SchedulerConfig
from ...settings import require_one_of
from ..space import Space
from ..trials import Window

SEARCHERS = ("bayes", "grid", "random", "sgd")


class StepModel(Protocol):
    """Predicts step times."""

    def predict(self, config: SchedulerConfig) -> float:
        """Seconds of a step with ``config``. A result that is not a positive number means that the model cannot predict it."""

    def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> StepModel:
        """A model calibrated with measured step times, each ``(config, seconds)``."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration to try. ``expected_gain`` is its expected improvement on the best configuration so far (0.01 is 1 %);
    None if the searcher does not estimate it."""

    config: SchedulerConfig
    expected_gain: float | None = None


class Searcher:
    """Proposes configurations to try, by ask and tell. Not thread-safe; never blocks.

    ``self._tried`` holds the windows of all trials so far by configuration, in the order of their first trials; also those of
    configurations that it did not propose. A trial that failed, or whose time is not a positive number, has no window.
    """

    def __init__(self) -> None:
        self._tried: dict[SchedulerConfig, list[Window]] = {}

    def ask(self) -> Candidate | None:
        """The next configuration to try; None if no further one is worth trying."""
        raise NotImplementedError

    def tell(self, config: SchedulerConfig, window: Window | None) -> None:
        """Add the result of a trial; ``window`` is None if the trial failed."""
        windows = self._tried.setdefault(config, [])
        if window is not None and 0 < window.seconds < math.inf:
            windows.append(window)

    def best(self) -> SchedulerConfig | None:
        """The fastest tried configuration, estimated through the noise; None if no trial has succeeded yet."""
        means = self._means()
        return min(means, key=means.__getitem__, default=None)

    def _means(self) -> dict[SchedulerConfig, float]:
        """Mean seconds of each configuration that has a window."""
        return {config: fmean(window.seconds for window in found) for config, found in self._tried.items() if found}

    def _seconds(self, config: SchedulerConfig) -> float | None:
        """Mean seconds of ``config``. If all its trials failed, the mean of the slowest configuration; None if no trial has
        succeeded yet."""
        means = self._means()
        return means.get(config, max(means.values(), default=None))


def uses_model(name: str) -> bool:
    """Whether the searcher ``name`` uses seeds and a model; if not, the caller need not make them.

    Raises:
        ConfigError: there is no searcher of that name.
    """
    return require_one_of(SEARCHERS, name, "tune_by") == "bayes"


def make_searcher(
    name: str,
    space: Space,
    *,
    seeds: Sequence[SchedulerConfig] = (),
    model: StepModel | None = None,
    random_seed: int = 0,
) -> Searcher:
    """A new searcher of that name. It is deterministic: equal arguments and equal results of trials give equal proposals.

    Each searcher proposes the incumbent first, unless it already has a trial of it. It never proposes a configuration twice,
    because the comparison at the end settles doubts from noise. ``ask`` returns the same proposal until the next ``tell``.

    Args:
        seeds: configurations to try early, best first. Only ``bayes`` uses seeds and ``model``.
        model: predicts each configuration once, and once more after the first few trials, which calibrate it. A configuration
            that it cannot predict counts as slow as the slowest one that it can.

    Raises:
        ConfigError: there is no searcher of that name, or a package that it needs is not installed; the message says what to
            do.
    """
    if uses_model(name):
        from .bayes import Bayes  # here: it needs scikit-optimize

        return Bayes(space, random_seed, seeds, model)
    from .baselines import GradientDescent, Grid, RandomSearch  # here: they import this module

    if name == "random":
        return RandomSearch(space, random_seed)
    return Grid(space) if name == "grid" else GradientDescent(space)
