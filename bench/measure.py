"""What a sample of step times says. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import comb
from statistics import median
from typing import Any


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> dict[str, Any]:
    """``{"median", "low", "high", "count"}``: the median, and the interval that holds the true one with this confidence.

    The interval lies between order statistics, so that nothing is assumed of the distribution but that the samples are
    independent (H. A. David and H. N. Nagaraja, "Order Statistics", section 7.1). Fewer than 6 samples cannot give 95 %:
    then it is from the least to the greatest.

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


def slowest(samples_by_rank: Sequence[Sequence[float]]) -> Sequence[float]:
    """The samples of the rank with the greatest median: a synchronous step is as fast as its slowest rank."""
    return max(samples_by_rank, key=median)
