"""One model on one cluster, and the step times measured there over configurations. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from statistics import median

from commsched import SchedulerConfig
from commsched.simulator.lower_bound import lower_bound
from commsched.simulator.scenario import bytes_factor
from commsched.tuner.meter import standard_error
from commsched.tuner.space import Space
from commsched.tuner.trials import Window

from ..harness.links import Links
from ..harness.scaling import Scaling, scale
from ..workloads import load_profile


def window_of(samples: Sequence[float]) -> Window:
    """The window of successive steps, computed as by the meter of a training job.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("a window has steps")
    middle = median(samples)
    return Window(middle, standard_error(list(samples), middle), len(samples))


@dataclass(frozen=True)
class Surface:
    """A surface of step times. ``passes[config]`` has the seconds of the steps of each window measured with that configuration;
    each pass over all configurations has one window.

    Raises:
        ValueError: there is no configuration, a configuration without a window, or a window without steps.
    """

    passes: Mapping[SchedulerConfig, Sequence[Sequence[float]]]

    def __post_init__(self) -> None:
        if not self.passes or not all(windows and all(windows) for windows in self.passes.values()):
            raise ValueError("a surface has configurations, each with windows, each with steps")

    @cached_property
    def seconds(self) -> dict[SchedulerConfig, float]:
        """The step time of each configuration, which replays take as the truth: the median of all its steps."""
        return {config: median(chain.from_iterable(windows)) for config, windows in self.passes.items()}

    @cached_property
    def best(self) -> SchedulerConfig:
        return min(self.seconds, key=lambda config: self.seconds[config])

    @cached_property
    def window_deviation(self) -> float:
        """Standard deviation of the logarithm of the factor that all steps of a window share, but that differs between windows
        of one configuration. It is estimated from the differences between passes over the whole grid, less the part that is due
        to the variation of single steps.

        Raises:
            ValueError: there is only one pass.
        """
        windows = [window_of(samples) for own in self.passes.values() for samples in own]
        pairs = [pair for own in self.passes.values() for pair in combinations(map(median, own), 2)]
        if not pairs:
            raise ValueError("one pass does not show how much windows differ")
        # Median absolute deviation, about 0: a few disturbed windows do not count; a drift from pass to pass does.
        variance = (1.4826 * median(abs(math.log(a / b)) for a, b in pairs)) ** 2 / 2
        own_variance = median((window.error_seconds / window.seconds) ** 2 for window in windows)
        return math.sqrt(max(variance - own_variance, 0.0))

    def regret(self, config: SchedulerConfig) -> float:
        """The relative amount by which the nearest configuration of the grid is slower than the best one; 0 for the best."""
        return self.seconds[self.nearest(config)] / self.seconds[self.best] - 1

    def nearest(self, config: SchedulerConfig) -> SchedulerConfig:
        """The measured configuration that is nearest in octaves of partition and of credit (in partitions)."""
        if config in self.passes:
            return config
        wanted = octaves(config)
        return min(self.passes, key=lambda each: math.dist(octaves(each), wanted))

    def draw(self, config: SchedulerConfig, steps: int, chance: random.Random) -> Window:
        """A random window of ``steps`` steps of the nearest configuration. The steps are drawn with replacement from one of its
        measured windows. All are multiplied by one random factor, because windows differ as a whole by more than the variation
        of their steps (:attr:`window_deviation`).

        Raises:
            ValueError: there is only one pass.
        """
        measured = chance.choice(self.passes[self.nearest(config)])
        factor = math.exp(chance.gauss(0.0, self.window_deviation))
        return window_of([factor * sample for sample in chance.choices(measured, k=steps)])


def octaves(config: SchedulerConfig) -> tuple[float, float]:
    """The position of ``config`` in a plane in which doubling the partition or the credit is a distance of one."""
    # A credit below one partition still allows one partition.
    return math.log2(config.partition_bytes), math.log2(max(1.0, config.credit_bytes / config.partition_bytes))


#: Difference of partition or credit, in octaves, that no search can distinguish.
_NEARLY_SAME_OCTAVES = 0.1

#: Step time of a configuration relative to the bound, on average over a grid, including changes of configuration.
_TYPICAL_SLOWDOWN = 1.4


@dataclass(frozen=True)
class Case:
    """One case. ``bandwidth`` (``"500mbit"``) is the rate of every link; for the other fields see ``tune.TuneOptions``.

    Raises:
        ConfigError: there is no such model, or the bandwidth is invalid.
    """

    model: str
    workers: int
    bandwidth: str
    rho: float
    megabytes: float
    transport: str
    coarse: bool

    def __str__(self) -> str:
        return f"{self.model}, {self.workers} workers, {self.bandwidth}, {self.transport}"

    @cached_property
    def links(self) -> Links:
        return Links.of(self.workers, 0, self.bandwidth)

    @property
    def rate_bytes_per_second(self) -> float:
        """Nominal rate of every link."""
        assert self.links.rates is not None
        return min(self.links.rates)

    @cached_property
    def scaling(self) -> Scaling:
        factor = bytes_factor(self.workers)
        return scale(load_profile(self.model), self.megabytes, self.rho, self.rate_bytes_per_second, factor)

    @property
    def space(self) -> Space:
        """The space of searches. They start from the default configuration of a job."""
        return Space(SchedulerConfig(), self.scaling.profile.nbytes)

    @cached_property
    def grid(self) -> list[SchedulerConfig]:
        """Every configuration at whole octaves; if ``coarse``, at every other octave of partition and of credit. The
        configuration from which searches start is first. Of configurations that are nearly the same (a credit of all bytes, and
        one of a few less), the grid has only one.
        """
        fine = [self.space.incumbent]
        for config in self.space.lattice():
            if all(math.dist(octaves(config), octaves(other)) > _NEARLY_SAME_OCTAVES for other in fine):
                fine.append(config)
        if not self.coarse:
            return fine
        by_size: dict[int, list[SchedulerConfig]] = {}
        for config in sorted(fine, key=lambda each: (each.partition_bytes, each.credit_bytes)):
            by_size.setdefault(config.partition_bytes, []).append(config)
        return list(dict.fromkeys([fine[0], *(config for same in list(by_size.values())[::2] for config in same[::2])]))

    def orders(self, passes: int) -> list[list[int]]:
        """Indexes of the grid, and the one after its last for the sizes that the job itself chooses, shuffled anew for each
        pass, so that a drift favours no configuration. Each call returns the same."""
        chance, places = random.Random(0), len(self.grid) + 1
        return [chance.sample(range(places), places) for _ in range(passes)]

    def expected_step_seconds(self) -> float:
        """An estimate; it needs no measurement."""
        layers = self.scaling.profile.layers
        per_byte = bytes_factor(self.workers) / self.rate_bytes_per_second
        bound = lower_bound(
            [layer.forward_seconds for layer in layers],
            [layer.backward_seconds for layer in layers],
            [per_byte * layer.nbytes for layer in layers],
        )
        return _TYPICAL_SLOWDOWN * bound
