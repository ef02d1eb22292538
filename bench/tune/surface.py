"""Step times over configurations, as they were measured: what searches are replayed over. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
        """What counts as a configuration's step time: the median over passes of its windows' medians."""
        return {config: median(map(median, windows)) for config, windows in self.passes.items()}

    @cached_property
    def best(self) -> SchedulerConfig:
        return min(self.seconds, key=lambda config: self.seconds[config])

    @cached_property
    def noise(self) -> float:
        """By what part one window's median is typically off its configuration's step time."""
        return median(
            abs(median(window) / self.seconds[config] - 1) for config, windows in self.passes.items() for window in windows
        )

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
        """As if so many steps were made with the nearest configuration: those of one measured window, of several where it takes
        more, and of all again and again where they do not suffice."""
        windows = list(self.passes[self.nearest(config)])
        samples: list[float] = []
        while len(samples) < steps:
            chance.shuffle(windows)
            samples += [sample for window in windows for sample in window]
        return window_of(samples[:steps])


def octaves(config: SchedulerConfig) -> tuple[float, float]:
    """Where it is in a plane in which one partition or credit that is twice as large is one away."""
    # Less credit than a partition lets one go all the same.
    return math.log2(config.partition_bytes), math.log2(max(1.0, config.credit_bytes / config.partition_bytes))
