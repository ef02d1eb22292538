"""One model on one cluster: what is to be measured there. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property

from commsched.core.config import SchedulerConfig
from commsched.simulator.bytes_factor import bytes_factor
from commsched.tuner.space import Space

from ..lower_bound import lower_bound
from ..train.links import Links
from ..train.scaling import Scaling, scale
from ..workloads.registry import load_profile
from .surface import octaves

#: Of partition or credit: no search could tell them apart.
_NEARLY_SAME_OCTAVES = 0.1

#: A configuration's step takes so many times the bound, on average over a grid, changes of configuration included.
_TYPICAL_SLOWDOWN = 1.4


@dataclass(frozen=True)
class Case:
    """``bandwidth`` (``"500mbit"``) is that of every link; for the rest see ``tune.TuneOptions``.

    Raises:
        ConfigError: there is no such model, or the bandwidth is none.
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
        """Nominal, of every link."""
        assert self.links.rates is not None
        return min(self.links.rates)

    @cached_property
    def scaling(self) -> Scaling:
        factor = bytes_factor(self.workers)
        return scale(load_profile(self.model), self.megabytes, self.rho, self.rate_bytes_per_second, factor)

    @property
    def space(self) -> Space:
        """Searches begin with what a job has that is told nothing."""
        return Space(SchedulerConfig(), self.scaling.profile.nbytes)

    @cached_property
    def grid(self) -> list[SchedulerConfig]:
        """Every configuration at whole octaves; if ``coarse``, at every other octave of partition and of credit. The one that
        searches begin with comes first. Of what is nearly the same (a credit of all bytes, and one of a few less) one is there.
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
        """Places in the grid, shuffled anew for each pass, so that a drift favours none. The same at every call."""
        chance = random.Random(0)
        return [chance.sample(range(len(self.grid)), len(self.grid)) for _ in range(passes)]

    def expected_step_seconds(self) -> float:
        """About; nothing has been measured."""
        layers = self.scaling.profile.layers
        per_byte = bytes_factor(self.workers) / self.rate_bytes_per_second
        bound = lower_bound(
            [layer.forward_seconds for layer in layers],
            [layer.backward_seconds for layer in layers],
            [per_byte * layer.nbytes for layer in layers],
        )
        return _TYPICAL_SLOWDOWN * bound
