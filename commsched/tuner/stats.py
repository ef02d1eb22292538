"""Statistics on step times: a comparison of two configurations, and a detector of drift. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

MIN_PAIRS = 4
MAX_PAIRS = 12

#: Pairs that estimate a winner's gain, measured after the pairs that decided.
STATED_PAIRS = 4

#: A smaller gain counts as none, because it is not worth a file or a switch.
MIN_GAIN = 0.005

# Quantiles of Student's t with pairs - 1 degrees of freedom, by pairs. _T_SURE is for 99.8 %: there are five looks, each with
# one chance in 500 to see a gain that does not exist.
_T_SURE = {4: 8.053, 6: 5.030, 8: 4.207, 10: 3.835, 12: 3.624}
_T_95 = {4: 3.182, 6: 2.571, 8: 2.365, 10: 2.262, 12: 2.201}


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """The result of :func:`compare`. ``gain`` is the part of the step time that the winner saves; the 95 % interval is from
    ``low`` to ``high``. ``better`` says whether it is beyond doubt that the winner saves time. The seconds are geometric means.

    All figures are from ``pairs`` windows of each configuration. If the deciding pairs were sure of the winner, these are the
    :data:`STATED_PAIRS` pairs after them; therefore ``low`` may be below 0 even then. Otherwise they are the deciding pairs.
    Because measuring stops early when there is little hope, a gain that was missed is then understated."""

    better: bool
    gain: float
    low: float
    high: float
    pairs: int
    incumbent_seconds: float
    winner_seconds: float


def compare(incumbent: Callable[[], float], winner: Callable[[], float], most_pairs: int = MAX_PAIRS) -> PairedComparison:
    """Measure both in turn, at least :data:`MIN_PAIRS` and at most ``most_pairs`` times each (rounded down to an even number).
    If the winner is better, measure :data:`STATED_PAIRS` pairs more. If it is not faster in these, it does not count as better.

    ``incumbent()`` and ``winner()`` measure one window and return its seconds per step (finite, positive). Their errors pass
    through.

    Raises:
        ValueError: ``most_pairs`` is too small.
    """
    if most_pairs < MIN_PAIRS:
        raise ValueError(f"{most_pairs} pairs are too few to compare; {MIN_PAIRS} are the least")
    pairs = _Pairs(incumbent, winner)
    while True:
        pairs.measure_two()
        if pairs.count < MIN_PAIRS:
            continue
        mean, error = pairs.saved()
        if mean - _T_SURE[pairs.count] * error > 0 and _part(mean) > MIN_GAIN:
            break
        if _part(mean + _T_95[pairs.count] * error) < MIN_GAIN or pairs.count + 2 > min(most_pairs, MAX_PAIRS):
            return pairs.compared(False)
    stated = _Pairs(incumbent, winner)
    while stated.count < STATED_PAIRS:
        stated.measure_two()
    return stated.compared(stated.saved()[0] > 0)


class _Pairs:
    """An equal number of windows of both configurations."""

    def __init__(self, incumbent: Callable[[], float], winner: Callable[[], float]) -> None:
        self._measure = incumbent, winner
        self._logs: tuple[list[float], list[float]] = [], []  # of their seconds

    @property
    def count(self) -> int:
        return len(self._logs[0])

    def measure_two(self) -> None:
        """Measure two pairs: the next four windows."""
        for which in (0, 1, 1, 0) if (self.count // 2).bit_count() % 2 == 0 else (1, 0, 0, 1):
            self._logs[which].append(math.log(self._measure[which]()))

    def saved(self) -> tuple[float, float]:
        """Mean logarithm of the ratios of seconds, incumbent over winner, and its standard error."""
        saved = [a - b for a, b in zip(*self._logs)]
        return statistics.fmean(saved), statistics.stdev(saved) / math.sqrt(len(saved))

    def compared(self, better: bool) -> PairedComparison:
        mean, error = self.saved()
        low, high = mean - _T_95[self.count] * error, mean + _T_95[self.count] * error
        seconds = [math.exp(statistics.fmean(log)) for log in self._logs]
        return PairedComparison(better, _part(mean), _part(low), _part(high), self.count, *seconds)


def _part(log_ratio: float) -> float:
    return 1 - math.exp(-log_ratio)


class DriftDetector:
    """Detects lasting changes of the step time, slower or faster; ``found`` is then true.

    The median of the first ``window_steps`` steps is the reference for later medians. Several consecutive medians must deviate,
    because an evaluation, a checkpoint or a busy minute is no reason to tune again.

    Args:
        window_steps: steps per median.
        windows: number of consecutive medians that must deviate, all in the same direction.
        tolerance: largest deviation that is ignored, relative to the first median.
        rest_steps: least number of steps before a change can be found.
    """

    def __init__(self, *, window_steps: int = 50, windows: int = 5, tolerance: float = 0.10, rest_steps: int = 0) -> None:
        self.found = False
        self.before_seconds = 0.0  # median of the first window
        self.now_seconds = 0.0  # median of the latest window
        self._window_steps = window_steps
        self._windows = windows
        self._tolerance = tolerance
        self._rest_steps = rest_steps
        self._steps = 0
        self._window: list[float] = []
        self._side = 0  # of the last median: 1 slower, -1 faster, 0 neither
        self._alike = 0  # consecutive medians on that side

    def add(self, seconds: float) -> None:
        """Add the seconds of one more step."""
        self._steps += 1
        self._window.append(seconds)
        if len(self._window) == self._window_steps:
            self.now_seconds = median(self._window)
            self._window.clear()
            self._compare()

    def _compare(self) -> None:
        if self.before_seconds == 0.0:
            self.before_seconds = self.now_seconds
        change = self.now_seconds - self.before_seconds
        side = 0 if abs(change) <= self._tolerance * self.before_seconds else 1 if change > 0 else -1
        self._alike = self._alike + 1 if side == self._side else 1
        self._side = side
        self.found = self.found or (side != 0 and self._alike >= self._windows and self._steps >= self._rest_steps)
