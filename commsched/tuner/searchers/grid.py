"""Every configuration of the lattice, from coarse to fine."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.scheduler import SchedulerConfig
from ..space import Space
from . import Candidate, Searcher

USES_MODEL = False


class Grid(Searcher):
    """The lattice of one value per octave: first the middle of each range, then the middles of its halves, and so on."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._queue = [space.incumbent, *_coarse_to_fine(space.lattice(per_octave=1))]

    def ask(self) -> Candidate | None:
        return next((Candidate(config) for config in self._queue if config not in self._tried), None)


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


def make_searcher(space: Space, random_seed: int) -> Searcher:
    return Grid(space)
