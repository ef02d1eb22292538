"""One model on one cluster, and its measurements. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property

from commsched.core.config import SchedulerConfig
from commsched.simulator.scenario import bytes_factor
from commsched.tuner.space import Space

from ..harness.links import Links
from ..harness.scaling import Scaling, scale
from ..lower_bound import lower_bound
from ..workloads.registry import load_profile
from .surface import octaves

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
        """Indexes of the grid, shuffled anew for each pass, so that a drift favours no configuration. Each call returns the
        same."""
        chance = random.Random(0)
        return [chance.sample(range(len(self.grid)), len(self.grid)) for _ in range(passes)]

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
