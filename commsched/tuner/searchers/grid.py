"""Every configuration of the lattice, from coarse to fine."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.config import SchedulerConfig
from ..observations import Observations
from ..space import Space
from ..trial import Candidate, Searcher, StepModel, Window

USES_MODEL = False


class Grid:
    """The lattice of one value per octave: first the middle of each range, then the middles of its halves, and so on."""

    def __init__(self, space: Space) -> None:
        self._queue = [space.incumbent, *_coarse_to_fine(space.lattice(per_octave=1))]
        self._tried = Observations()

    def ask(self) -> Candidate | None:
        return next((Candidate(config) for config in self._queue if config not in self._tried), None)

    def tell(self, config: SchedulerConfig, window: Window | None) -> None:
        self._tried.add(config, window)

    def best(self) -> SchedulerConfig | None:
        return self._tried.best()


def _coarse_to_fine(lattice: Sequence[SchedulerConfig]) -> list[SchedulerConfig]:
    partitions = _levels([config.partition_bytes for config in lattice])
    credits = {
        partition_bytes: _levels([config.credit_bytes for config in lattice if config.partition_bytes == partition_bytes])
        for partition_bytes in partitions
    }

    def coarseness(config: SchedulerConfig) -> tuple[int, int]:
        levels = (partitions[config.partition_bytes], credits[config.partition_bytes][config.credit_bytes])
        return max(levels), sum(levels)

    return sorted(lattice, key=coarseness)


def _levels(values: Sequence[int]) -> dict[int, int]:
    """For each value, the number of times the range must be halved until the value is a middle."""
    levels: dict[int, int] = {}

    def halve(rest: list[int], level: int) -> None:
        if rest:
            middle = len(rest) // 2
            levels[rest[middle]] = level
            halve(rest[:middle], level + 1)
            halve(rest[middle + 1 :], level + 1)

    halve(sorted(set(values)), 0)
    return levels


def make_searcher(space: Space, seeds: Sequence[SchedulerConfig], model: StepModel | None, random_seed: int) -> Searcher:
    return Grid(space)
