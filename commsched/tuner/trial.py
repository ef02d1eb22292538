"""Interfaces of a search: searchers and models, their candidates, and the windows that trials measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..core.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive training steps with one configuration, as the slowest rank measured them.

    ``seconds`` is the median of the undisturbed steps, or the mean of all steps if many are disturbed (``meter.summary``).
    ``error_seconds`` is its standard error. ``steps`` is the number of steps counted, ``rejected`` the number left out as
    disturbed. Both exclude the steps before the configuration had settled.
    """

    seconds: float
    error_seconds: float
    steps: int
    rejected: int = 0

    def defect(self) -> str | None:
        """The reason why the window is not a valid measurement; None if it is valid."""
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            return f"{self.seconds} seconds per step"
        if not (math.isfinite(self.error_seconds) and self.error_seconds >= 0):
            return f"an error of {self.error_seconds} seconds"
        return None


class TrialFailed(Exception):
    """One trial failed; the message gives the reason. Training continues, and the search may continue."""


class Stopped(Exception):
    """Training has ended or is about to end; no further trial is possible."""


#: ``measure(config, steps)`` trains with ``config`` until a window of ``steps`` undisturbed steps is full. It raises
#: TrialFailed or Stopped. It blocks, and only the tuner's thread calls it.
Measure = Callable[[SchedulerConfig, int], Window]


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


class Searcher(Protocol):
    """Proposes configurations to try, by ask and tell. Not thread-safe; never blocks."""

    def ask(self) -> Candidate | None:
        """The next configuration to try; None if no further one is worth trying."""
        ...

    def tell(self, config: SchedulerConfig, window: Window | None) -> None:
        """Add the result of a trial; ``window`` is None if the trial failed. The searcher also learns from configurations that
        it did not propose."""
        ...

    def best(self) -> SchedulerConfig | None:
        """The fastest tried configuration, estimated through the noise; None if no trial has succeeded yet."""
        ...
