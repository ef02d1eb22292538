"""Guesses of good configurations: one before the first step, from the sizes of the job alone, and the first ones to try, which
minimize a bound on the step time in priority order, computed from measured layer and link times. Pure."""

from __future__ import annotations

import math
from itertools import accumulate

from ..core.scheduler import SchedulerConfig
from ..simulator.profile import Profile
from ..simulator.scenario import bytes_factor
from .profiler import LinkEstimate
from .space import MAX_TUNED_PARTITION_BYTES, MIN_TUNED_PARTITION_BYTES, lanes

_SIZES_PER_OCTAVE = 8

#: Rate of a network whose speed is not known, in bytes per second: 1 Gbit/s. Ordinary Ethernet has at least this rate, and a
#: partition that is too large for a slow network costs more than one that is too small for a fast one.
UNKNOWN_RATE = 125e6

#: The largest partition before the first step. A larger one delays urgent layers much if the guess of the rate is too high.
MAX_FIRST_PARTITION_BYTES = 4_000_000

#: Seconds by which one more partition prolongs a step before it is measured: over the parameter server, and for collectives in
#: an agreed order.
_PARTITION_SECONDS, _COLLECTIVE_PARTITION_SECONDS = 0.05e-3, 0.3e-3


def before_first_step(
    nbytes: int,
    workers: int,
    *,
    servers: int = 0,
    ordered: bool = False,
    rate: float = UNKNOWN_RATE,
    processor_seconds: float = 0.0,
) -> tuple[int, int]:
    """Partition in bytes, and credit in partitions, for ``nbytes`` of gradients, before any step was seen.

    As in :func:`seeds`, ``delta* = sqrt(theta * S / (m * c))`` balances the overhead of messages against the partitions that
    are already committed when an urgent one arrives. All bytes count as critical, because layer times are not known.

    Args:
        workers, servers, ordered: see :func:`seeds`.
        rate: bytes per second of a worker's network card.
        processor_seconds: see :class:`~commsched.tuner.model.Model`.
    """
    seconds_per_byte = bytes_factor(workers, servers) / rate
    count, committed = _lanes(workers, servers, ordered)
    theta = processor_seconds + (_COLLECTIVE_PARTITION_SECONDS if ordered else _PARTITION_SECONDS)
    best = math.sqrt(theta * nbytes / (committed * seconds_per_byte))
    size = round(min(max(best, MIN_TUNED_PARTITION_BYTES), MAX_FIRST_PARTITION_BYTES))
    return size, count


def seeds(
    profile: Profile, link: LinkEstimate, workers: int, *, servers: int = 0, ordered: bool = False, policy: str = "priority"
) -> list[SchedulerConfig]:
    """At most two configurations, the more promising first.

    Partitions have ``delta`` bytes and an overhead of ``theta`` seconds each. The overhead on the critical bytes ``S`` is
    ``S / delta * theta``. ``m`` partitions are already committed when an urgent one arrives, which costs ``m * delta * c``;
    ``c`` is seconds per byte of gradient. These two terms are the part that depends on ``delta`` in the bound
    ``T*(with theta) + W * c + N_W * theta`` on the step time in priority order with a window of ``W`` bytes in ``N_W``
    messages: only those that were committed while nothing critical was ready can precede the critical bytes. Their sum is least
    at ``delta* = sqrt(theta * S / (m * c))``, as long as the same bytes remain critical. Often they do not, because overhead
    alone can make more layers critical. The minimum is therefore searched among sizes. A credit of two partitions keeps a link
    busy if messages travel for less time than a partition takes. ``m`` is the number of partitions in the credit, plus one that
    a parameter server passes on.

    The first seed has credit for two partitions on the way to each shard, or for eight to each separate server. These
    partitions share a link and do not wait for each other. With collectives the first seed has credit for four partitions. The
    second seed has credit for two.

    Args:
        workers: number of workers that use the network; with a hierarchy, number of hosts.
        servers: number of separate servers; 0 means a shard on every worker.
        ordered: whether partitions are averaged by collectives, one at a time.

    Raises:
        ValueError: there are fewer than two workers.
    """
    if workers < 2:
        raise ValueError(f"workers={workers}: with one there is nothing to tune")
    count, committed = _lanes(workers, servers, ordered)
    size = best_partition(profile, link, committed)
    found = [SchedulerConfig(size, count * size, policy)]
    size = best_partition(profile, link, 2 + _passed_on(ordered))
    found.append(SchedulerConfig(size, 2 * size, policy))
    return list(dict.fromkeys(found))


def _lanes(workers: int, servers: int, ordered: bool) -> tuple[int, float]:
    """The number of partitions in the credit, and how many of the committed ones an urgent partition has to wait for."""
    count = lanes(workers, servers, ordered)
    # Partitions committed to other shards travel beside an urgent partition rather than before it: half of them count.
    return count, count if ordered else count / 2 + _passed_on(ordered)


def _passed_on(ordered: bool) -> int:
    """The number of partitions that a parameter server passes on while an urgent one waits."""
    return 0 if ordered else 1


def best_partition(profile: Profile, link: LinkEstimate, committed: float) -> int:
    """The partition size in bytes with the least bound, among eight sizes per octave. ``committed`` is ``m`` of
    :func:`seeds`."""
    layers = profile.layers
    ready = list(accumulate(layer.backward_seconds for layer in reversed(layers)))[::-1]
    tail = list(accumulate(layer.forward_seconds for layer in reversed(layers)))[::-1]
    sent = accumulate(layer.nbytes for layer in layers)
    paths = [(r + q, nbytes) for r, q, nbytes in zip(ready, tail, sent) if nbytes]

    def bound(size: int) -> float:
        per_byte = link.seconds_per_byte + link.partition_seconds / size
        longest = max((seconds + per_byte * nbytes for seconds, nbytes in paths), default=0.0)
        return max(profile.compute_seconds, longest) + committed * size * link.seconds_per_byte

    steps = int(_SIZES_PER_OCTAVE * math.log2(MAX_TUNED_PARTITION_BYTES / MIN_TUNED_PARTITION_BYTES)) + 1
    sizes = [round(MIN_TUNED_PARTITION_BYTES * math.exp2(step / _SIZES_PER_OCTAVE)) for step in range(steps)]
    return min(sizes, key=bound)
