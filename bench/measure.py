"""What a sample of step times says. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import comb
from statistics import median
from typing import Any

#: Weights of a system that does what it is to do differ from plain averaging by less, relative to what training changed.
TOLERATED_DIFFERENCE = 1e-4
#: With fewer samples no interval holds the median with 95 % confidence: theirs is the range.
LEAST_SAMPLES = 6


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> dict[str, Any]:
    """``{"median", "low", "high", "count"}``: the median, and the interval that holds the true one with this confidence.

    The interval lies between order statistics, so that nothing is assumed of the distribution but that the samples are
    independent (H. A. David and H. N. Nagaraja, "Order Statistics", section 7.1). Fewer than :data:`LEAST_SAMPLES`
    cannot give 95 %: then it is from the least to the greatest.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("a median needs samples")
    ordered = sorted(samples)
    rank = interval_rank(len(ordered), confidence)
    return {"median": median(ordered), "low": ordered[rank], "high": ordered[-1 - rank], "count": len(ordered)}


def interval_rank(count: int, confidence: float) -> int:
    """How many of ``count`` ordered samples to leave out at each end: the most that keeps the confidence; 0 if none does.

    Each sample is below the true median with probability 1/2, so leaving out ``k`` misses it when at most ``k`` are below, or
    above.
    """
    tails = accumulate(comb(count, below) / 2**count for below in range((count + 1) // 2))
    enough = [left_out for left_out, tail in enumerate(tails) if 1 - 2 * tail >= confidence]
    return max(enough, default=0)


def interval_words(count: int) -> str:
    """What ``low`` and ``high`` of so many samples are, for readers."""
    return "95 % interval of the median" if count >= LEAST_SAMPLES else f"range of {count} steps"


def median_absolute_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Of ``(true, predicted)``, as a share of what is true.

    Raises:
        statistics.StatisticsError: there are none.
    """
    return median(abs(predicted / true - 1) for true, predicted in pairs)


def slowest(samples_by_rank: Sequence[Sequence[float]]) -> Sequence[float]:
    """The samples of the rank with the greatest median: a synchronous step is as fast as its slowest rank."""
    return max(samples_by_rank, key=median)
