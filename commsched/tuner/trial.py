"""What a search asks for, and what a trial of it found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..core.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive training steps with one configuration, as the slowest rank saw them.

    ``seconds`` is the median of its undisturbed steps, or the mean of all where many are disturbed (``meter.summary``), and
    ``error_seconds`` its standard error. ``steps`` were counted, ``rejected`` left out as disturbed; both without those before
    the configuration had settled.
    """

    seconds: float
    error_seconds: float
    steps: int
    rejected: int = 0

    def defect(self) -> str | None:
        """Why it is no measurement; None: it is one."""
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            return f"{self.seconds} seconds per step"
        if not (math.isfinite(self.error_seconds) and self.error_seconds >= 0):
            return f"an error of {self.error_seconds} seconds"
        return None


class TrialFailed(Exception):
    """One trial came to nothing; says why. Training goes on, and so may the search."""


class Stopped(Exception):
    """Training has ended, or is about to: no trial can be made any more."""


#: ``measure(config, steps)`` trains with a configuration until a window of so many undisturbed steps is full. Raises
#: TrialFailed or Stopped. Blocks: only the tuner's thread calls it.
Measure = Callable[[SchedulerConfig, int], Window]


class StepModel(Protocol):
    """Says beforehand how long steps take."""

    def predict(self, config: SchedulerConfig) -> float:
        """Seconds of a step with ``config``. Where it is not a positive number, the model cannot tell."""
        ...

    def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> StepModel:
        """The model that it becomes with what was measured: ``(config, seconds)``."""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """``expected_gain`` is by what part the searcher expects it to be faster than the best so far (its expected improvement:
    0.01 is 1 %); None: it has no opinion."""

    config: SchedulerConfig
    expected_gain: float | None = None


class Searcher(Protocol):
    """Proposes configurations to try; ask and tell. Not thread-safe; waits for nothing."""

    def ask(self) -> Candidate | None:
        """What to try next; None: there is nothing left worth trying."""
        ...

    def tell(self, config: SchedulerConfig, window: Window | None) -> None:
        """What a trial found; None: it failed. Also of configurations that were not asked for: they may teach something."""
        ...

    def best(self) -> SchedulerConfig | None:
        """The fastest of those tried, as far as it can tell through the noise; None: no trial has succeeded yet."""
        ...
