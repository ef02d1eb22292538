"""Is the winner really faster? Windows of the incumbent (A) and the winner (B), in turn, until it is decided.

A search picks the best of many noisy numbers, which is therefore better than it is; and a number from early in a job may have
been taken on an emptier machine. So nothing of the search counts here. Windows are measured anew, in the order of Thue and
Morse, A B B A, B A A B, B A A B, ...: in two successive pairs each comes first once, so that a drift, or an effect of the
change itself, cancels, and no period of training keeps step with the order. The unit is the logarithm of a pair's ratio; a
t-test of their mean, after every second pair, decides.

A test that ends as soon as it is sure ends on a lucky pair, so its numbers overstate. Therefore a winner that is to be kept is
measured once more, and how much it gains is said by these last pairs alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

LEAST_PAIRS = 4
MOST_PAIRS = 12

#: That say what a winner gains, after those that decided.
STATED_PAIRS = 4

#: A smaller gain is none: it would not be worth a file, or a switch.
LEAST_GAIN = 0.005

# Quantiles of Student's t with pairs - 1 degrees of freedom. 99.8 %: five looks, each with one chance in 500 to see a gain
# where there is none.
_T_SURE = {4: 8.053, 6: 5.030, 8: 4.207, 10: 3.835, 12: 3.624}
_T_95 = {4: 3.182, 6: 2.571, 8: 2.365, 10: 2.262, 12: 2.201}


@dataclass(frozen=True, slots=True)
class Comparison:
    """``gain`` is the part of the step time that the winner saves, between ``low`` and ``high`` with 95 %; ``better`` if it is
    beyond doubt that it saves any. The seconds are geometric means. All of them are of ``pairs`` windows each. If those that
    decide were sure of the winner, these are the :data:`STATED_PAIRS` after them, so that ``low`` may be below 0 even so. Else
    they are those that decide, and as these end when there is little hope, a gain that was missed is understated."""

    better: bool
    gain: float
    low: float
    high: float
    pairs: int
    incumbent_seconds: float
    winner_seconds: float


def compare(incumbent: Callable[[], float], winner: Callable[[], float], most_pairs: int = MOST_PAIRS) -> Comparison:
    """Measure both in turn, at least :data:`LEAST_PAIRS` and at most ``most_pairs`` times each (an even number counts), and
    :data:`STATED_PAIRS` times more if the winner is better. If it is not in these, it is not better.

    ``incumbent()`` and ``winner()`` measure one window and return its seconds per step (finite, positive); what they raise
    passes through.

    Raises:
        ValueError: ``most_pairs`` is too few.
    """
    if most_pairs < LEAST_PAIRS:
        raise ValueError(f"{most_pairs} pairs are too few to compare; {LEAST_PAIRS} are the least")
    pairs = _Pairs(incumbent, winner)
    while True:
        pairs.measure_two()
        if pairs.count < LEAST_PAIRS:
            continue
        mean, error = pairs.saved()
        if mean - _T_SURE[pairs.count] * error > 0 and _part(mean) > LEAST_GAIN:
            break
        if _part(mean + _T_95[pairs.count] * error) < LEAST_GAIN or pairs.count + 2 > min(most_pairs, MOST_PAIRS):
            return pairs.compared(False)
    stated = _Pairs(incumbent, winner)
    while stated.count < STATED_PAIRS:
        stated.measure_two()
    return stated.compared(stated.saved()[0] > 0)


class _Pairs:
    """Windows of both, as many of each."""

    def __init__(self, incumbent: Callable[[], float], winner: Callable[[], float]) -> None:
        self._measure = incumbent, winner
        self._logs: tuple[list[float], list[float]] = [], []  # of their seconds

    @property
    def count(self) -> int:
        return len(self._logs[0])

    def measure_two(self) -> None:
        """Two pairs: the next four windows."""
        for which in (0, 1, 1, 0) if (self.count // 2).bit_count() % 2 == 0 else (1, 0, 0, 1):
            self._logs[which].append(math.log(self._measure[which]()))

    def saved(self) -> tuple[float, float]:
        """Mean of the logarithms of the ratios, and its standard error."""
        saved = [a - b for a, b in zip(*self._logs)]
        return statistics.fmean(saved), statistics.stdev(saved) / math.sqrt(len(saved))

    def compared(self, better: bool) -> Comparison:
        mean, error = self.saved()
        low, high = mean - _T_95[self.count] * error, mean + _T_95[self.count] * error
        seconds = [math.exp(statistics.fmean(log)) for log in self._logs]
        return Comparison(better, _part(mean), _part(low), _part(high), self.count, *seconds)


def _part(log_ratio: float) -> float:
    return 1 - math.exp(-log_ratio)
