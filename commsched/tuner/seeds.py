"""Configurations worth trying first, by the bound on what priority order takes, from what was measured. Pure."""

from __future__ import annotations

import math
from itertools import accumulate

from ..core.config import SchedulerConfig
from ..simulator.profile import Profile
from .profiler import Link
from .space import MAX_PARTITION_BYTES, MIN_PARTITION_BYTES

_SIZES_PER_OCTAVE = 8


def seeds(
    profile: Profile, link: Link, workers: int, *, servers: int = 0, collective: bool = False, policy: str = "priority"
) -> list[SchedulerConfig]:
    """At most two configurations, the more promising first.

    Partitions of ``delta`` bytes that cost ``theta`` seconds each take ``S / delta * theta`` on the critical bytes ``S``, and
    ``m`` of them cannot be called back when something urgent comes, which costs ``m * delta * c``; ``c`` is seconds per byte of
    gradient. They are what depends on ``delta`` in the bound ``T*(with theta) + W * c + N_W * theta`` on what priority order
    takes with a window of ``W`` bytes in ``N_W`` messages (``window_bound`` in ``bench/lower_bound.py``). Both together are
    least at ``delta* = sqrt(theta * S / (m * c))``, as long as the same bytes remain critical. Often they do not, since
    overhead alone can make more layers critical, so the least is looked for among sizes. A credit of two partitions keeps a
    link busy on which messages travel for less time than a partition takes; ``m`` is how many it holds, and one more that a
    parameter server passes on.

    The first seed has credit for two partitions on the way to each shard (eight to each separate server), which share a link
    and so do not wait for each other; of collectives for four. The second has credit for two.

    Args:
        workers: that meet in the network; with a hierarchy, hosts.
        servers: separate ones; 0: a shard on every worker.
        collective: partitions are averaged by collectives, one at a time.

    Raises:
        ValueError: there are fewer than two workers.
    """
    if workers < 2:
        raise ValueError(f"workers={workers}: with one there is nothing to tune")
    passed_on = 0 if collective else 1
    lanes = 4 if collective else 8 * servers or 2 * workers
    # What is committed to other shards stands beside an urgent partition rather than before it: half of it counts.
    size = best_partition(profile, link, lanes if collective else lanes / 2 + passed_on)
    found = [SchedulerConfig(size, lanes * size, policy)]
    size = best_partition(profile, link, 2 + passed_on)
    found.append(SchedulerConfig(size, 2 * size, policy))
    return list(dict.fromkeys(found))


def best_partition(profile: Profile, link: Link, committed: float) -> int:
    """The size in bytes with the least bound, of eight per octave; ``committed`` is ``m`` of :func:`seeds`."""
    layers = profile.layers
    ready = list(accumulate(layer.backward_seconds for layer in reversed(layers)))[::-1]
    tail = list(accumulate(layer.forward_seconds for layer in reversed(layers)))[::-1]
    sent = accumulate(layer.nbytes for layer in layers)
    paths = [(r + q, nbytes) for r, q, nbytes in zip(ready, tail, sent) if nbytes]

    def bound(size: int) -> float:
        per_byte = link.seconds_per_byte + link.partition_seconds / size
        longest = max((seconds + per_byte * nbytes for seconds, nbytes in paths), default=0.0)
        return max(profile.compute_seconds, longest) + committed * size * link.seconds_per_byte

    steps = int(_SIZES_PER_OCTAVE * math.log2(MAX_PARTITION_BYTES / MIN_PARTITION_BYTES)) + 1
    sizes = [round(MIN_PARTITION_BYTES * math.exp2(step / _SIZES_PER_OCTAVE)) for step in range(steps)]
    return min(sizes, key=bound)
