"""Is the winner really faster? Windows of the incumbent (A) and the winner (B), in turn, until it is decided.

A search picks the best of many noisy numbers, which is therefore better than it is; and a number from early in a job may have
been taken on an emptier machine. So nothing of the search counts here. Windows are measured anew as A B, B A, A B, ...: in
two successive pairs each comes first once, and a drift, or an effect of the change itself, cancels. The unit is the
logarithm of a pair's ratio; a t-test of their mean, after every second pair, decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

LEAST_PAIRS = 4
MOST_PAIRS = 12

#: A smaller gain is none: it would not be worth a file, or a switch.
LEAST_GAIN = 0.005

# Quantiles of Student's t with pairs - 1 degrees of freedom. 99.8 %: five looks, each with one chance in 500 to see a gain
# where there is none.
_T_SURE = {4: 8.053, 6: 5.030, 8: 4.207, 10: 3.835, 12: 3.624}
_T_95 = {4: 3.182, 6: 2.571, 8: 2.365, 10: 2.262, 12: 2.201}


@dataclass(frozen=True, slots=True)
class Comparison:
    """``gain`` is the part of the step time that the winner saves, between ``low`` and ``high`` with 95 %; ``better`` if that
    is beyond doubt. The seconds are geometric means over ``pairs`` windows each."""

    better: bool
    gain: float
    low: float
    high: float
    pairs: int
    incumbent_seconds: float
    winner_seconds: float


def compare(incumbent: Callable[[], float], winner: Callable[[], float], most_pairs: int = MOST_PAIRS) -> Comparison:
    """Measure both in turn, at least :data:`LEAST_PAIRS` and at most ``most_pairs`` times each (an even number counts).

    ``incumbent()`` and ``winner()`` measure one window and return its seconds per step (finite, positive); what they raise
    passes through.

    Raises:
        ValueError: ``most_pairs`` is too few.
    """
    if most_pairs < LEAST_PAIRS:
        raise ValueError(f"{most_pairs} pairs are too few to compare; {LEAST_PAIRS} are the least")
    logs: tuple[list[float], list[float]] = [], []  # of the seconds of incumbent and winner
    while True:
        for which in (0, 1, 1, 0):
            logs[which].append(math.log((incumbent, winner)[which]()))
        pairs = len(logs[0])
        if pairs < LEAST_PAIRS:
            continue
        saved = [a - b for a, b in zip(*logs)]
        mean, error = statistics.fmean(saved), statistics.stdev(saved) / math.sqrt(pairs)
        low, high = mean - _T_95[pairs] * error, mean + _T_95[pairs] * error
        better = mean - _T_SURE[pairs] * error > 0 and _part(mean) > LEAST_GAIN
        if better or _part(high) < LEAST_GAIN or pairs + 2 > min(most_pairs, MOST_PAIRS):
            seconds = [math.exp(statistics.fmean(log)) for log in logs]
            return Comparison(better, _part(mean), _part(low), _part(high), pairs, *seconds)


def _part(log_ratio: float) -> float:
    return 1 - math.exp(-log_ratio)
