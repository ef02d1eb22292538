"""Step times over configurations, as they were measured: what searches are replayed over. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from statistics import median

from commsched.core.config import SchedulerConfig
from commsched.tuner.meter import standard_error
from commsched.tuner.trial import Window


def window_of(samples: Sequence[float]) -> Window:
    """What successive steps say, as the meter of a training job would put it.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("a window has steps")
    middle = median(samples)
    return Window(middle, standard_error(list(samples), middle), len(samples))


@dataclass(frozen=True)
class Surface:
    """``passes[config]`` has the steps of each window that was measured with that configuration, in seconds, one window in each
    pass over all of them.

    Raises:
        ValueError: there is no configuration, or one without a window, or a window without steps.
    """

    passes: Mapping[SchedulerConfig, Sequence[Sequence[float]]]

    def __post_init__(self) -> None:
        if not self.passes or not all(windows and all(windows) for windows in self.passes.values()):
            raise ValueError("a surface has configurations, each with windows, each with steps")

    @cached_property
    def seconds(self) -> dict[SchedulerConfig, float]:
        """What counts as a configuration's step time, the truth of replays: the median of all its steps."""
        return {config: median(chain.from_iterable(windows)) for config, windows in self.passes.items()}

    @cached_property
    def best(self) -> SchedulerConfig:
        return min(self.seconds, key=lambda config: self.seconds[config])

    @cached_property
    def window_deviation(self) -> float:
        """Standard deviation of the logarithm of what all steps of a window have in common, and another window of the same
        configuration has not: as the passes differ, over the whole grid, less what windows differ by as their steps vary.

        Raises:
            ValueError: there is one pass only.
        """
        windows = [window_of(samples) for own in self.passes.values() for samples in own]
        pairs = [pair for own in self.passes.values() for pair in combinations(map(median, own), 2)]
        if not pairs:
            raise ValueError("how much windows differ cannot be told from one pass")
        # Median absolute deviation, about 0: a few disturbed windows do not count; a drift from pass to pass does.
        variance = (1.4826 * median(abs(math.log(a / b)) for a, b in pairs)) ** 2 / 2
        own_variance = median((window.error_seconds / window.seconds) ** 2 for window in windows)
        return math.sqrt(max(variance - own_variance, 0.0))

    def regret(self, config: SchedulerConfig) -> float:
        """By what part the nearest configuration of the grid is slower than the best one; 0 of the best."""
        return self.seconds[self.nearest(config)] / self.seconds[self.best] - 1

    def nearest(self, config: SchedulerConfig) -> SchedulerConfig:
        """The one measured that is the fewest octaves of partition and of credit, in partitions, away."""
        if config in self.passes:
            return config
        wanted = octaves(config)
        return min(self.passes, key=lambda each: math.dist(octaves(each), wanted))

    def draw(self, config: SchedulerConfig, steps: int, chance: random.Random) -> Window:
        """A window of so many steps, as if they were made with the nearest configuration: drawn, with replacement, from one of
        its measured windows, and all multiplied by one random factor, since a window is off as a whole more than its steps say
        (:attr:`window_deviation`).

        Raises:
            ValueError: there is one pass only.
        """
        measured = chance.choice(self.passes[self.nearest(config)])
        factor = math.exp(chance.gauss(0.0, self.window_deviation))
        return window_of([factor * sample for sample in chance.choices(measured, k=steps)])


def octaves(config: SchedulerConfig) -> tuple[float, float]:
    """Where it is in a plane in which one partition or credit that is twice as large is one away."""
    # Less credit than a partition lets one go all the same.
    return math.log2(config.partition_bytes), math.log2(max(1.0, config.credit_bytes / config.partition_bytes))
