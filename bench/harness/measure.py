"""Measured values and their statistics: layer times, CPU time, and samples of step times. Needs no engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import comb, prod
from statistics import median
from typing import Any

from commsched.simulator.profile import ITEMSIZE, Profile


@dataclass(frozen=True)
class LayerTimes:
    """Lists with one entry for each layer, in order of use in forward: name, median seconds, bytes of all its gradients, and
    bytes of each gradient."""

    names: list[str]
    forward_seconds: list[float]
    backward_seconds: list[float]
    nbytes: list[int]
    tensors: list[list[int]]

    @classmethod
    def of(cls, profile: Profile) -> LayerTimes:
        """The layer times of ``profile``: its layers sleep for these times."""
        layers = profile.layers
        return cls(
            [layer.name for layer in layers],
            [layer.forward_seconds for layer in layers],
            [layer.backward_seconds for layer in layers],
            [layer.nbytes for layer in layers],
            [[ITEMSIZE * prod(shape) for shape in layer.shapes] for layer in layers],
        )


def cpu_seconds(pids: Sequence[int] = ()) -> float:
    """CPU time so far of this process and the processes ``pids``, summed over all their threads."""
    # This is Linux's number of the CPU clock of another process; see clock_getcpuclockid(3), which Python does not offer.
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


#: The weights of a correct system differ from plain averaging by less than this, relative to the change that training made.
TOLERATED_DIFFERENCE = 1e-4
#: An interval needs so many samples to contain the median with 95 % confidence; of fewer, the range is reported.
MIN_SAMPLES = 6


def median_interval(samples: Sequence[float]) -> dict[str, Any]:
    """``{"median", "low", "high", "count"}``: the median, and the interval that contains the true median with 95 % confidence.

    The ends of the interval are order statistics. It assumes nothing about the distribution except that the samples are
    independent (H. A. David and H. N. Nagaraja, "Order Statistics", section 7.1). Fewer than :data:`MIN_SAMPLES` samples cannot
    give 95 %; the interval is then from the least sample to the greatest.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("a median needs samples")
    ordered = sorted(samples)
    rank = interval_rank(len(ordered), 0.95)
    return {"median": median(ordered), "low": ordered[rank], "high": ordered[-1 - rank], "count": len(ordered)}


def interval_rank(count: int, confidence: float) -> int:
    """The number of samples to leave out at each end of ``count`` ordered samples: the largest number that keeps the
    confidence, or 0 if no number does.

    Each sample is below the true median with probability 1/2. If ``k`` samples are left out at each end, the interval misses
    the median when at most ``k`` samples are below it, or at most ``k`` above it.
    """
    tails = accumulate(comb(count, below) / 2**count for below in range((count + 1) // 2))
    enough = [left_out for left_out, tail in enumerate(tails) if 1 - 2 * tail >= confidence]
    return max(enough, default=0)


def interval_words(count: int) -> str:
    """The meaning of ``low`` and ``high`` for ``count`` samples, in words."""
    return "95 % interval of the median" if count >= MIN_SAMPLES else f"range of {count} steps"


def median_absolute_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Median absolute error of the predictions, relative to the true value. Each pair is ``(true, predicted)``.

    Raises:
        statistics.StatisticsError: there are no pairs.
    """
    return median(abs(predicted / true - 1) for true, predicted in pairs)


def slowest(samples_by_rank: Sequence[Sequence[float]]) -> Sequence[float]:
    """The samples of the rank with the greatest median: a synchronous step is as fast as its slowest rank."""
    return max(samples_by_rank, key=median)


def beside(base: str, name: str, by_rank: Sequence[Mapping[str, list[float]]]) -> dict[str, float]:
    """Compare ``name`` with ``base``, which ran in turn with it, by the seconds of a step by turn, of each rank. A step takes
    as long as on the slowest rank. The interval is that of the ratio of the turns. :func:`beside_columns` has the headings."""
    seconds, its = ([max(turns) for turns in zip(*(each[which] for each in by_rank), strict=True)] for which in (name, base))
    ratio = median_interval([mine / other for mine, other in zip(seconds, its, strict=True)])
    return {
        "milliseconds": 1e3 * median(seconds),
        "ratio": ratio["median"],
        "ratio_low": ratio["low"],
        "ratio_high": ratio["high"],
    }


def beside_columns(base: str) -> dict[str, str]:
    return {"milliseconds": "ms/step", "ratio": f"of {base}", "ratio_low": "low", "ratio_high": "high"}


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """``names``, rotated so that each turn starts with another one: no system always follows the same one."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]
