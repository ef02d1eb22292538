"""Searchers, found by name. The module ``commsched.tuner.searchers.<name>`` defines ``USES_MODEL``: whether the searcher uses
seeds and a model; if not, the caller need not make them. It also defines ``make_searcher(space, random_seed)``, or
``make_searcher(space, random_seed, seeds, model)`` if it uses a model."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from statistics import fmean
from typing import Any, Protocol

from ...core.errors import ConfigError
from ...core.scheduler import SchedulerConfig
from ..space import Space
from ..trials import Window


class StepModel(Protocol):
    """Predicts step times."""

    def predict(self, config: SchedulerConfig) -> float:
        """Seconds of a step with ``config``. A result that is not a positive number means that the model cannot predict it."""
        ...

    def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> StepModel:
        """A model calibrated with measured step times, each ``(config, seconds)``."""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration to try. ``expected_gain`` is its expected improvement on the best configuration so far (0.01 is 1 %);
    None if the searcher does not estimate it."""

    config: SchedulerConfig
    expected_gain: float | None = None


class Observations:
    """Windows by configuration. A trial that failed, or whose time is not a positive number, has no window."""

    def __init__(self) -> None:
        self._windows: dict[SchedulerConfig, list[Window]] = {}

    def add(self, config: SchedulerConfig, window: Window | None) -> None:
        windows = self._windows.setdefault(config, [])
        if window is not None and 0 < window.seconds < math.inf:
            windows.append(window)

    def __contains__(self, config: SchedulerConfig) -> bool:
        return config in self._windows

    @property
    def configs(self) -> list[SchedulerConfig]:
        """Configurations in the order of their first trials."""
        return list(self._windows)

    def windows(self, config: SchedulerConfig) -> list[Window]:
        return self._windows.get(config, [])

    def seconds(self, config: SchedulerConfig) -> float | None:
        """Mean seconds of the configuration's windows. If all its trials failed, the mean of the slowest configuration; None if
        no trial has succeeded yet."""
        if windows := self._windows.get(config):
            return fmean(window.seconds for window in windows)
        return max((fmean(w.seconds for w in windows) for windows in self._windows.values() if windows), default=None)

    def best(self) -> SchedulerConfig | None:
        """The configuration with the lowest mean; None if no trial has succeeded yet."""
        succeeded = [config for config, windows in self._windows.items() if windows]
        return min(succeeded, key=lambda config: fmean(w.seconds for w in self._windows[config]), default=None)


class Searcher:
    """Proposes configurations to try, by ask and tell. Not thread-safe; never blocks.

    ``self._tried`` holds the trials so far, those of configurations that it did not propose too.
    """

    def __init__(self) -> None:
        self._tried = Observations()

    def ask(self) -> Candidate | None:
        """The next configuration to try; None if no further one is worth trying."""
        raise NotImplementedError

    def tell(self, config: SchedulerConfig, window: Window | None) -> None:
        """Add the result of a trial; ``window`` is None if the trial failed."""
        self._tried.add(config, window)

    def best(self) -> SchedulerConfig | None:
        """The fastest tried configuration, estimated through the noise; None if no trial has succeeded yet."""
        return self._tried.best()


def searcher_names() -> list[str]:
    """The names of all searchers, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def uses_model(name: str) -> bool:
    """Whether the searcher ``name`` uses seeds and a model.

    Raises:
        ConfigError: there is no searcher of that name.
    """
    return bool(_module(name).USES_MODEL)


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
        seeds: configurations to try early, best first. Not all searchers use seeds and ``model``; see :func:`uses_model`.
        model: predicts each configuration once, and once more after the first few trials, which calibrate it. A configuration
            that it cannot predict counts as slow as the slowest one that it can.

    Raises:
        ConfigError: there is no searcher of that name, or a package that it needs is not installed; the message says what to
            do.
    """
    module = _module(name)
    searcher: Searcher = module.make_searcher(space, random_seed, *((seeds, model) if module.USES_MODEL else ()))
    return searcher


def _module(name: str) -> Any:
    if name not in searcher_names():
        raise ConfigError(f"tune_by={name!r} is unknown; there are: {', '.join(searcher_names())}")
    return import_module(f"{__name__}.{name}")
