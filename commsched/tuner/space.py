"""What tuning may choose: partition, credit as a multiple of it, and the policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core.config import SchedulerConfig
from ..core.errors import ConfigError
from ..core.policies import policy_names

MIN_PARTITION_BYTES = 64_000
MAX_PARTITION_BYTES = 32_000_000

#: Largest credit, in partitions.
MAX_RATIO = 32

CHOICES = frozenset({"partition", "credit", "policy"})

#: Steps within an octave of the lattice.
_FACTORS = {1: (1.0,), 2: (1.0, 1.5)}

#: Credits of the lattice, in partitions: whole ones, since these are what fits.
_RATIOS = {1: (1, 2, 4, 8, 16, 32), 2: (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)}

#: A credit that the model's size limits is not in the lattice where it is by no more than this above one of these.
_ALIKE = 1.1


@dataclass(frozen=True)
class Space:
    """Configurations that a search may propose, as such and as points of a unit cube.

    A point has one coordinate for each of these that is free: the logarithm of the partition, the logarithm of credit over
    partition (credit below one partition means the same as one partition), and the policy where several are asked for.
    What is in ``fixed`` stays as it is in the incumbent, and so do all other fields; and so, within the bounds, does a size
    whose bounds are less than an octave apart, since the model is small.

    The incumbent is the configuration in use. It is a legal answer even where it lies outside these bounds, or has a policy
    that was not asked for; its point is then the nearest.

    Args:
        incumbent: the configuration to begin with.
        total_bytes: size of all tensors; no partition and no credit is larger (but for a fixed one).
        fixed: any of ``partition``, ``credit``, ``policy``.
        policies: what to choose from; none: the incumbent's.

    Raises:
        ConfigError: there is no such policy.
        ValueError: ``total_bytes`` is below 1, or ``fixed`` has another name in it.
    """

    incumbent: SchedulerConfig
    total_bytes: int
    fixed: frozenset[str] = frozenset()
    policies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.total_bytes < 1:
            raise ValueError(f"total_bytes={self.total_bytes}: there is nothing to send")
        if unknown := self.fixed - CHOICES:
            raise ValueError(f"fixed={sorted(unknown)}: there are {', '.join(sorted(CHOICES))}")
        if strange := [policy for policy in self.policies if policy not in policy_names()]:
            raise ConfigError(f"policy '{strange[0]}' is unknown; there are: {', '.join(policy_names())}")

    @property
    def choices(self) -> tuple[str, ...]:
        """Policies that may be proposed, the incumbent's first if it is among them."""
        own = self.incumbent.policy
        if not self.policies or "policy" in self.fixed:
            return (own,)
        return tuple(sorted(dict.fromkeys(self.policies), key=lambda policy: policy != own))

    @property
    def dimensions(self) -> int:
        """Number of coordinates of a point; 0: there is nothing to choose."""
        return self._partition_is_free + self._credit_is_free + self._policy_is_free

    @property
    def policy_dimension(self) -> int | None:
        """Which coordinate is the policy, whose distances mean nothing; None: there is no such."""
        return self.dimensions - 1 if self._policy_is_free else None

    def to_point(self, config: SchedulerConfig) -> tuple[float, ...]:
        """Its place in the unit cube, or that of the nearest configuration within the bounds."""
        near = self._within(config)
        point = []
        if self._partition_is_free:
            low, high = self._partition_bounds
            point.append(math.log(near.partition_bytes / low) / math.log(high / low))
        if self._credit_is_free:
            point.append(math.log(near.credit_bytes / near.partition_bytes) / math.log(MAX_RATIO))
        if self._policy_is_free:
            places = self._places
            place = places.index(config.policy if config.policy in places else near.policy)
            point.append((place + 0.5) / len(places))
        return tuple(min(max(x, 0.0), 1.0) for x in point)

    def from_point(self, point: Sequence[float]) -> SchedulerConfig:
        """The configuration at a point, in whole bytes.

        Raises:
            ValueError: wrong number of coordinates, or one outside 0..1.
        """
        if len(point) != self.dimensions or not all(0 <= x <= 1 for x in point):
            raise ValueError(f"point {tuple(point)}: there must be {self.dimensions} coordinates of 0 to 1")
        rest = iter(point)
        partition_bytes, credit_bytes, policy = self.incumbent.partition_bytes, self.incumbent.credit_bytes, self.choices[0]
        if self._partition_is_free:
            low, high = self._partition_bounds
            partition_bytes = round(low * (high / low) ** next(rest))
        if self._credit_is_free:
            credit_bytes = round(partition_bytes * MAX_RATIO ** next(rest))
        if self._policy_is_free:
            policy = self._places[min(int(next(rest) * len(self._places)), len(self._places) - 1)]
        return self._within(SchedulerConfig(partition_bytes, credit_bytes, policy))

    def lattice(self, per_octave: int = 1) -> list[SchedulerConfig]:
        """Partitions of the incumbent's size times 1/4, 1/2, 1, 2 ...; for each, credit of 1, 2, 4 ... partitions; all of it
        for each policy. Two per octave: with 1.5, 3, 6 ... between them. None twice.

        Raises:
            ValueError: ``per_octave`` is neither 1 nor 2.
        """
        if per_octave not in _FACTORS:
            raise ValueError(f"per_octave={per_octave}: 1 or 2")
        factors = _FACTORS[per_octave]
        near = self._within(self.incumbent)
        partitions, ratios = [near.partition_bytes], [near.credit_bytes / near.partition_bytes]
        if self._partition_is_free:
            low, high = self._partition_bounds
            octaves = range(-math.ceil(math.log2(high / low)) - 1, math.ceil(math.log2(high / low)) + 1)
            sizes = [round(near.partition_bytes * 2.0**octave * factor) for octave in octaves for factor in factors]
            partitions = [size for size in sizes if low <= size <= high]
        if self._credit_is_free:
            ratios = list(_RATIOS[per_octave])
        found = [
            self._within(SchedulerConfig(partition_bytes, round(partition_bytes * ratio), policy))
            for policy in self.choices
            for partition_bytes in partitions
            for ratio in ratios
        ]
        return [config for config in dict.fromkeys(found) if not (self._credit_is_free and _is_beside_another(config))]

    def clip(self, config: SchedulerConfig) -> SchedulerConfig:
        """The incumbent as it is; any other within the bounds, with what is fixed as in the incumbent."""
        return config if config == self.incumbent else self._within(config)

    def _within(self, config: SchedulerConfig) -> SchedulerConfig:
        partition_bytes, credit_bytes = self.incumbent.partition_bytes, self.incumbent.credit_bytes
        if "partition" not in self.fixed:
            low, high = self._partition_bounds
            partition_bytes = min(max(config.partition_bytes, low), high)
        if "credit" not in self.fixed:
            most = min(MAX_RATIO * partition_bytes, max(self.total_bytes, partition_bytes))
            wanted = config.credit_bytes if self._credit_is_free else self.incumbent.credit_bytes
            credit_bytes = min(max(wanted, partition_bytes), most)
        policy = config.policy if config.policy in self.choices else self.choices[0]
        return replace(self.incumbent, partition_bytes=partition_bytes, credit_bytes=credit_bytes, policy=policy)

    @property
    def _partition_bounds(self) -> tuple[int, int]:
        low, high = MIN_PARTITION_BYTES, min(MAX_PARTITION_BYTES, max(self.total_bytes, MIN_PARTITION_BYTES))
        if high < 2 * low:
            low = high = min(max(self.incumbent.partition_bytes, low), high)
        return low, high

    @property
    def _partition_is_free(self) -> bool:
        low, high = self._partition_bounds
        return "partition" not in self.fixed and low < high

    @property
    def _credit_is_free(self) -> bool:
        smallest = self.incumbent.partition_bytes if "partition" in self.fixed else MIN_PARTITION_BYTES
        return "credit" not in self.fixed and 2 * smallest <= self.total_bytes

    @property
    def _policy_is_free(self) -> bool:
        return len(self._places) > 1

    @property
    def _places(self) -> tuple[str, ...]:
        """Policies that have a place of their own on the coordinate: an incumbent's that was not asked for has one too."""
        return tuple(dict.fromkeys((self.incumbent.policy, *self.choices)))


def _is_beside_another(config: SchedulerConfig) -> bool:
    ratio = config.credit_bytes / config.partition_bytes
    return any(multiple < ratio < _ALIKE * multiple for multiple in _RATIOS[2])
