"""The choices of tuning: partition, credit as a multiple of the partition, and policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core.errors import ConfigError
from ..core.policies import policy_names
from ..core.scheduler import SchedulerConfig
from ..settings import Settings

MIN_TUNED_PARTITION_BYTES = 64_000
MAX_TUNED_PARTITION_BYTES = 32_000_000

#: Bytes below which a group of tensors says nothing about the job's sizes, and has nothing to choose. Plugins register flags in
#: groups of their own.
MIN_TELLING_BYTES = 2 * MIN_TUNED_PARTITION_BYTES

#: Largest credit in partitions, unless there are so many shards that it would leave some without a partition.
MAX_RATIO = 32

CHOICES = frozenset({"partition", "credit", "policy"})

#: Partition sizes within an octave of the lattice, as factors.
_FACTORS = {1: (1.0,), 2: (1.0, 1.5)}

#: Credits of the lattice, in whole partitions, because only whole partitions fit into a credit.
_RATIOS = {1: (1, 2, 4, 8, 16, 32), 2: (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)}

#: A credit that the model's size limits is left out of the lattice if it exceeds one of these by less than this factor.
_ALIKE = 1.1


@dataclass(frozen=True)
class Space:
    """The configurations that a search may propose, and their points in a unit cube.

    A point has one coordinate for each free choice: the logarithm of the partition, the logarithm of credit over partition (a
    credit below one partition means one partition), and the policy if several policies are given. Choices in ``fixed``, and all
    other fields, stay as in the incumbent. In a small model the bounds of a size may be less than an octave apart; such a size
    also stays as in the incumbent, within the bounds.

    The incumbent is the configuration in use. A search may return it even if it lies outside the bounds, or has a policy that
    is not in ``policies``; its point is then the nearest one.

    Args:
        incumbent: the configuration to start from.
        total_bytes: size of all tensors; no partition and no credit is larger, except a fixed one.
        fixed: any of ``partition``, ``credit``, ``policy``.
        policies: the policies to choose from; if empty, only the incumbent's.
        largest_ratio: the largest credit in partitions, see :func:`max_ratio`.
        least_ratio: the least credit in partitions.

    Raises:
        ConfigError: there is no such policy.
        ValueError: ``total_bytes`` is below 1, or ``fixed`` contains another name.
    """

    incumbent: SchedulerConfig
    total_bytes: int
    fixed: frozenset[str] = frozenset()
    policies: tuple[str, ...] = ()
    largest_ratio: int = MAX_RATIO
    least_ratio: int = 1

    def __post_init__(self) -> None:
        if self.total_bytes < 1:
            raise ValueError(f"total_bytes={self.total_bytes}: there is nothing to send")
        if unknown := self.fixed - CHOICES:
            raise ValueError(f"fixed={sorted(unknown)}: there are {', '.join(sorted(CHOICES))}")
        if strange := [policy for policy in self.policies if policy not in policy_names()]:
            raise ConfigError(f"policy '{strange[0]}' is unknown; there are: {', '.join(policy_names())}")

    @property
    def choices(self) -> tuple[str, ...]:
        """The policies that may be proposed. The incumbent's policy is first if it is among them."""
        own = self.incumbent.policy
        if not self.policies or "policy" in self.fixed:
            return (own,)
        return tuple(sorted(dict.fromkeys(self.policies), key=lambda policy: policy != own))

    @property
    def dimensions(self) -> int:
        """Number of coordinates of a point; 0 means that there is nothing to choose."""
        return self._partition_is_free + self._credit_is_free + self._policy_is_free

    @property
    def policy_dimension(self) -> int | None:
        """Index of the policy's coordinate, in which distances mean nothing; None if the policy is not free."""
        return self.dimensions - 1 if self._policy_is_free else None

    def to_point(self, config: SchedulerConfig) -> tuple[float, ...]:
        """The point of ``config`` in the unit cube, or the point of the nearest configuration within the bounds."""
        near = self._within(config)
        point = []
        if self._partition_is_free:
            low, high = self._partition_bounds
            point.append(math.log(near.partition_bytes / low) / math.log(high / low))
        if self._credit_is_free:
            point.append(math.log(near.credit_bytes / near.partition_bytes) / math.log(self.largest_ratio))
        if self._policy_is_free:
            places = self._places
            place = places.index(config.policy if config.policy in places else near.policy)
            point.append((place + 0.5) / len(places))
        return tuple(min(max(x, 0.0), 1.0) for x in point)

    def from_point(self, point: Sequence[float]) -> SchedulerConfig:
        """The configuration at a point, in whole bytes.

        Raises:
            ValueError: the number of coordinates is wrong, or a coordinate is outside 0..1.
        """
        if len(point) != self.dimensions or not all(0 <= x <= 1 for x in point):
            raise ValueError(f"point {tuple(point)}: there must be {self.dimensions} coordinates of 0 to 1")
        rest = iter(point)
        partition_bytes, credit_bytes, policy = self.incumbent.partition_bytes, self.incumbent.credit_bytes, self.choices[0]
        if self._partition_is_free:
            low, high = self._partition_bounds
            partition_bytes = round(low * (high / low) ** next(rest))
        if self._credit_is_free:
            credit_bytes = round(partition_bytes * self.largest_ratio ** next(rest))
        if self._policy_is_free:
            policy = self._places[min(int(next(rest) * len(self._places)), len(self._places) - 1)]
        return self._within(SchedulerConfig(partition_bytes, credit_bytes, policy))

    def lattice(self, per_octave: int = 1) -> list[SchedulerConfig]:
        """A lattice of configurations without duplicates. Partitions have the incumbent's size times 1/4, 1/2, 1, 2 ...;
        credits have 1, 2, 4 ... partitions; each combination appears with each policy. With two per octave, the factors 1.5, 3,
        6 ... lie between these.

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
            ratios = self._ratios(per_octave)
        found = [
            self._within(SchedulerConfig(partition_bytes, round(partition_bytes * ratio), policy))
            for policy in self.choices
            for partition_bytes in partitions
            for ratio in ratios
        ]
        return [config for config in dict.fromkeys(found) if not (self._credit_is_free and self._is_beside_another(config))]

    def clip(self, config: SchedulerConfig) -> SchedulerConfig:
        """The incumbent unchanged; any other configuration limited to the bounds, with the incumbent's fixed choices."""
        return config if config == self.incumbent else self._within(config)

    def _within(self, config: SchedulerConfig) -> SchedulerConfig:
        partition_bytes, credit_bytes = self.incumbent.partition_bytes, self.incumbent.credit_bytes
        if "partition" not in self.fixed:
            low, high = self._partition_bounds
            partition_bytes = min(max(config.partition_bytes, low), high)
        if "credit" not in self.fixed:
            most = min(self.largest_ratio * partition_bytes, max(self.total_bytes, partition_bytes))
            wanted = config.credit_bytes if self._credit_is_free else self.incumbent.credit_bytes
            credit_bytes = min(max(wanted, self.least_ratio * partition_bytes), most)
        policy = config.policy if config.policy in self.choices else self.choices[0]
        return replace(self.incumbent, partition_bytes=partition_bytes, credit_bytes=credit_bytes, policy=policy)

    def _ratios(self, per_octave: int) -> list[float]:
        more = range(1, round(math.log2(self.largest_ratio / MAX_RATIO)) + 1)
        return [*_RATIOS[per_octave], *(MAX_RATIO * 2**octave for octave in more)]

    def _is_beside_another(self, config: SchedulerConfig) -> bool:
        ratio = config.credit_bytes / config.partition_bytes
        return any(multiple < ratio < _ALIKE * multiple for multiple in self._ratios(2))

    @property
    def _partition_bounds(self) -> tuple[int, int]:
        low, high = MIN_TUNED_PARTITION_BYTES, min(MAX_TUNED_PARTITION_BYTES, max(self.total_bytes, MIN_TUNED_PARTITION_BYTES))
        if high < 2 * low:
            low = high = min(max(self.incumbent.partition_bytes, low), high)
        return low, high

    @property
    def _partition_is_free(self) -> bool:
        low, high = self._partition_bounds
        return "partition" not in self.fixed and low < high

    @property
    def _credit_is_free(self) -> bool:
        smallest = self.incumbent.partition_bytes if "partition" in self.fixed else MIN_TUNED_PARTITION_BYTES
        return "credit" not in self.fixed and max(2, self.least_ratio) * smallest <= self.total_bytes

    @property
    def _policy_is_free(self) -> bool:
        return len(self._places) > 1

    @property
    def _places(self) -> tuple[str, ...]:
        """The policies with a place of their own on the coordinate. The incumbent's policy has one even if it may not be
        proposed."""
        return tuple(dict.fromkeys((self.incumbent.policy, *self.choices)))


def lanes(workers: int, servers: int = 0, ordered: bool = False) -> int:
    """The credit, in partitions, that keeps the network busy: two on the way to each shard, eight to each separate
    server, or four collectives in one order."""
    return 4 if ordered else 8 * servers or 2 * workers


def max_ratio(workers: int, servers: int = 0, ordered: bool = False) -> int:
    """The largest credit to try, in partitions: a power of two."""
    return 1 << math.ceil(math.log2(max(MAX_RATIO, lanes(workers, servers, ordered))))


def fixed_by(settings: Settings) -> frozenset[str]:
    """The choices that the user has set, which stay. A policy that is set counts only if no policies to choose from are
    named."""
    auto = {name for name in ("partition", "credit") if getattr(settings, name) is None}
    return (settings.given & CHOICES) - auto - ({"policy"} if settings.tune_policies else set())
