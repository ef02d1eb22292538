"""Searchers that use no model: they are simple, and others are compared with them."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from random import Random

from ...core.errors import ConfigError
from ...core.scheduler import SchedulerConfig
from ..space import Space
from . import Candidate, Searcher

#: The search ends after this many consecutive draws of configurations that were tried already.
_MAX_DRAWS = 1000

#: Distance in the unit cube over which a slope is measured: about an octave of the partition, half an octave of the credit.
_DIFFERENCE = 0.12

#: Learning rate: a slope of log(seconds) of 100 % over the whole range moves the point by this much.
_RATE = 0.5
_MOMENTUM = 0.5
_LONGEST_STEP = 0.25

#: A shorter step changes nothing measurable.
_SHORTEST_STEP = 0.02
_MAX_STEPS = 100


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
    """Return, by value, the number of times the range must be halved until the value is a middle."""
    levels: dict[int, int] = {}

    def halve(rest: list[int], level: int) -> None:
        if rest:
            middle = len(rest) // 2
            levels[rest[middle]] = level
            halve(rest[:middle], level + 1)
            halve(rest[middle + 1 :], level + 1)

    halve(sorted(set(values)), 0)
    return levels


class RandomSearch(Searcher):
    """Proposes the incumbent, then one random draw after another."""

    def __init__(self, space: Space, random_seed: int) -> None:
        super().__init__()
        self._space = space
        self._random = Random(random_seed)
        self._next = space.incumbent

    def ask(self) -> Candidate | None:
        for _ in range(_MAX_DRAWS):
            if self._next not in self._tried:
                return Candidate(self._next)
            self._next = self._space.from_point([self._random.random() for _ in range(self._space.dimensions)])
        return None


class GradientDescent(Searcher):
    """Gradient descent with momentum, with which ByteScheduler's authors compared Bayesian optimisation.

    Starts at the incumbent's point. It measures the slope of log(seconds) by one more trial for each coordinate, then makes a
    step with momentum. It measures no configuration twice, stays in the unit cube, and ends when its steps become too short to
    matter. The policy has no slope and does not change.

    Raises:
        ConfigError: only the policy is free.
    """

    def __init__(self, space: Space) -> None:
        if space.policy_dimension == 0:
            raise ConfigError(
                "tune_by='sgd' follows slopes, and policies have none; only the policy is free: take bayes, grid or random"
            )
        super().__init__()
        self._space = space
        self._walk = self._descend()
        self._next: SchedulerConfig | None = next(self._walk)

    def ask(self) -> Candidate | None:
        while self._next is not None and self._next in self._tried:
            seconds = self._seconds(self._next)
            try:
                self._next = None if seconds is None else self._walk.send(math.log(seconds))
            except StopIteration:
                self._next = None
        return None if self._next is None else Candidate(self._next)

    def _descend(self) -> Generator[SchedulerConfig, float, None]:
        """Yields a configuration to measure and receives its log(seconds)."""
        at = yield self._space.incumbent
        point = list(self._space.to_point(self._space.incumbent))
        moving = [d for d in range(len(point)) if d != self._space.policy_dimension]
        velocity = [0.0] * len(point)
        for _ in range(_MAX_STEPS):
            for d in moving:
                beside = list(point)
                beside[d] += _DIFFERENCE if point[d] + _DIFFERENCE <= 1 else -_DIFFERENCE
                slope = ((yield self._space.from_point(beside)) - at) / (beside[d] - point[d])
                step = _MOMENTUM * velocity[d] - _RATE * slope
                velocity[d] = min(max(step, -_LONGEST_STEP), _LONGEST_STEP)
            before, point = point, [min(max(x + v, 0.0), 1.0) for x, v in zip(point, velocity)]
            velocity = [x - y for x, y in zip(point, before)]  # the bounds of the cube stop it
            if max(map(abs, velocity), default=0.0) < _SHORTEST_STEP:
                return
            at = yield self._space.from_point(point)
