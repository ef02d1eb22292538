"""Systems as rules of the simulator: for given sizes, with the best sizes, and as a row was measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from commsched import SchedulerConfig
from commsched.simulator.scenario import DDP_BUCKET_MIB, DDP_FIRST_BUCKET_MIB, Exchange, Rules
from commsched.transports import users_of

_MIN_PARTITION_BYTES = 16_000
_MAX_PARTITION_BYTES = 16_000_000
_MAX_PARTITIONS = 2000
_UNLIMITED = 2**62
_MEBIBYTE = 2**20

_BUCKETS = re.compile(r"buckets (\d+(?:\.\d+)?(?:e[+-]?\d+)?) MiB( \(default)?")

#: Seconds of a step with the given rules.
StepSeconds = Callable[[Rules], float]


class NotSimulated(Exception):
    """The simulator has no model of the row; the message says why."""


class Simulation(Protocol):
    """One system as rules of the simulator. ``is_on_commsched`` says whether the system uses commsched's scheduler."""

    @property
    def is_on_commsched(self) -> bool: ...

    def rules(self, partition_bytes: int, credit_bytes: int) -> Rules:
        """The rules with the given sizes, as far as the system takes them."""
        ...

    def best(self, gradient_bytes: int, shards: int, partition: int | None, credit: int | None, seconds: StepSeconds) -> Rules:
        """The rules with the least ``seconds(rules)``, over the choices of the system.

        Args:
            partition, credit: sizes in bytes; None means to choose them.
            shards: number of shards of the parameter server.
        """
        ...

    def clipped(self) -> Simulation:
        """The system in a loop in which every update needs a norm of all averages."""
        ...

    def measured(self, row: Mapping[str, Any]) -> Rules:
        """The rules with which ``row`` of ``bench train`` was measured. ``row`` did not clip, unless this is :meth:`clipped`.

        Raises:
            NotSimulated: the row lacks information.
        """
        ...


@dataclass(frozen=True)
class PartitionRules:
    """A system on commsched's scheduler.

    Args:
        partition_bytes, credit_bytes, fusion_bytes: sizes that the system does not choose; None means that it does. Sizes that
            depend on those of commsched need a subclass with ``rules`` of its own.
        exchange: the kind of averaging, if nothing was measured that says otherwise.
        late_norm: whether a loop that clips waits for the norm only, in the next forward. Otherwise it waits for all averages
            before it clips.
        barrier, hold, norm, pushes_first: see ``commsched.simulator.scenario.Rules``.
    """

    policy: str
    partition_bytes: int | None = None
    credit_bytes: int | None = None
    fusion_bytes: int | None = None
    exchange: Exchange = Exchange.PARAMETER_SERVER
    late_norm: bool = False
    barrier: bool = False
    hold: bool = False
    norm: bool = False
    pushes_first: bool = True

    is_on_commsched: ClassVar[bool] = True

    def rules(self, partition_bytes: int, credit_bytes: int) -> Rules:
        sizes = self.partition_bytes or partition_bytes, self.credit_bytes or credit_bytes
        config = SchedulerConfig(*sizes, self.policy, self.fusion_bytes)
        return Rules(config, self.exchange, self.barrier, self.hold, norm=self.norm, pushes_first=self.pushes_first)

    def best(self, gradient_bytes: int, shards: int, partition: int | None, credit: int | None, seconds: StepSeconds) -> Rules:
        """Partition sizes are tried by factors of two, with credit for one partition on each shard and one more. Then other
        credits are tried for the best size."""
        lanes = shards if self.exchange is Exchange.PARAMETER_SERVER else 1

        def credits(size: int) -> Iterable[int]:
            """The credits to try; the first one is used with every partition size."""
            of_lanes = min(gradient_bytes, (lanes + 1) * size)
            given = self.credit_bytes or credit
            return [given] if given else dict.fromkeys([of_lanes, 2 * size, 4 * size, min(gradient_bytes, 3 * lanes * size)])

        chosen = partition or partition_sizes(gradient_bytes)[0]
        if partition is None and self.partition_bytes is None:
            sizes = partition_sizes(gradient_bytes)
            best = _descend((self.rules(size, next(iter(credits(size)))) for size in sizes), seconds)
            chosen = best.config.partition_bytes
        return _fastest([self.rules(chosen, each) for each in credits(chosen)], seconds)

    def clipped(self) -> PartitionRules:
        if not self.late_norm:
            return replace(self, barrier=True)
        return replace(self, norm=True, exchange=Exchange.SPLIT if self.exchange is Exchange.ALL_REDUCE else self.exchange)

    def measured(self, row: Mapping[str, Any]) -> Rules:
        if row["partition_bytes"] is None or row["credit_bytes"] is None:
            raise NotSimulated("the row has no partition and credit")
        rules = self.rules(row["partition_bytes"], row["credit_bytes"])
        config = replace(rules.config, partition_bytes=row["partition_bytes"], credit_bytes=row["credit_bytes"])
        # All collectives use one model, whatever decides their order: the model of a ring or of an equally fast algorithm.
        exchange = rules.exchange
        if row.get("transport", "ps") in users_of("collective"):
            exchange = Exchange.SPLIT if self.norm or "+rsag" in row["system"] else Exchange.ALL_REDUCE
        return replace(rules, config=config, exchange=exchange)


#: Sizes of buckets that a tuned system tries, as divisors of the size of all gradients.
BUCKET_SHARES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class BucketRules:
    """A system that averages buckets in backward order, one after another.

    Args:
        exchange: the kind of averaging.
        barrier: whether the next forward waits for all averages.
        first_bucket_mib: the size of the first bucket, if it differs from DDP's default.
        tuned: whether the system chooses among DDP's buckets and those of ``BUCKET_SHARES``.
    """

    exchange: Exchange
    barrier: bool = False
    first_bucket_mib: float | None = None
    tuned: bool = False

    is_on_commsched: ClassVar[bool] = False

    def buckets(self, bucket_bytes: float, first_bucket_bytes: float | None = None) -> Rules:
        size = max(1, round(bucket_bytes))
        first = None if first_bucket_bytes is None else max(1, round(first_bucket_bytes))
        return Rules(SchedulerConfig(size, _UNLIMITED, "fifo"), self.exchange, self.barrier, False, size, first)

    def rules(self, partition_bytes: int = 0, credit_bytes: int = 0) -> Rules:
        """The rules with the default buckets. There are no partitions."""
        first = None if self.first_bucket_mib is None else self.first_bucket_mib * _MEBIBYTE
        return self.buckets(DDP_BUCKET_MIB * _MEBIBYTE, first)

    def best(self, gradient_bytes: int, shards: int, partition: int | None, credit: int | None, seconds: StepSeconds) -> Rules:
        shares = BUCKET_SHARES if self.tuned else ()
        return _fastest([self.rules(), *(self.buckets(gradient_bytes // share) for share in shares)], seconds)

    def clipped(self) -> BucketRules:
        return replace(self, barrier=True)

    def measured(self, row: Mapping[str, Any]) -> Rules:
        match = _BUCKETS.search(row["config"])
        if match is None:
            raise NotSimulated(f"its configuration does not name the bucket size: {row['config']!r}")
        size = float(match[1]) * _MEBIBYTE
        if match[2] and "the first too" not in row["config"]:
            return self.buckets(size, size * DDP_FIRST_BUCKET_MIB / DDP_BUCKET_MIB)
        return self.buckets(size)


def _fastest(candidates: Sequence[Rules], seconds: StepSeconds) -> Rules:
    """The best candidate. A single one is not simulated, because that takes long on large clusters."""
    return candidates[0] if len(candidates) == 1 else min(candidates, key=seconds)


def _descend(candidates: Iterable[Rules], seconds: StepSeconds) -> Rules:
    """The best candidate. The search ends after two worse candidates in a row, because time over size has one minimum and small
    sizes take the longest to simulate. Equal ones end nothing: neighbours of a size may be as good, before it gets better."""
    best: tuple[float, Rules] | None = None
    worse = 0
    for each in candidates:
        taken = seconds(each)
        if best is None or taken < best[0]:
            best, worse = (taken, each), 0
        elif taken > best[0] * (1 + 1e-9):
            worse += 1
            if worse == 2:
                break
    assert best is not None
    return best[1]


def partition_sizes(gradient_bytes: int) -> list[int]:
    """Partition sizes to try, from 16 MB down by halves."""
    least = max(_MIN_PARTITION_BYTES, gradient_bytes // _MAX_PARTITIONS)
    sizes = [_MAX_PARTITION_BYTES]
    while sizes[-1] // 2 >= least:
        sizes.append(sizes[-1] // 2)
    return sizes
