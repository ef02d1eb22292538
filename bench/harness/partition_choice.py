"""The cost of a partition, measured with the transport in use, and the partition and credit chosen from it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from commsched import SchedulerConfig, Session
from commsched.settings import parse_bytes

from .averaging import ConfigBarrier, average, register
from .lower_bound import best_partition
from .measure import LayerTimes, cpu_seconds

_PARTITIONS = (2, 4, 8, 16, 32, 64)
_REPETITIONS = 7


@dataclass(frozen=True)
class MessageCost:
    """The cost of one more partition: the seconds by which it prolongs a transfer (``link_seconds``) and the CPU seconds of one
    rank (``cpu_seconds``)."""

    link_seconds: float
    cpu_seconds: float


def measure_message_cost(
    session: Session, barrier: ConfigBarrier, total_bytes: int, collective: str = "all_reduce"
) -> MessageCost:
    """Measure the cost of a partition by averaging the same ``total_bytes`` in few and in many partitions. Collective.

    The configuration has changed afterwards.
    """
    _, group = register(session, "message cost", total_bytes)
    wall, cpu = {}, {}
    for partitions in _PARTITIONS:
        barrier.switch(SchedulerConfig(-(-total_bytes // partitions), total_bytes, collective=collective))
        average(group)  # this average may still use the old partitions
        barrier.wait()
        seconds, used = [], []
        for _ in range(_REPETITIONS):
            barrier.wait()
            cpu_began, began = cpu_seconds(), time.perf_counter()
            average(group)
            seconds.append(time.perf_counter() - began)
            barrier.wait()  # serving the other ranks is a cost too
            used.append(cpu_seconds() - cpu_began)
        # A synchronous transfer ends with its slowest rank. Noise only adds time, so the minimum is nearest the true value.
        by_rank = session.gather([seconds, median(used)])
        wall[partitions] = min(map(max, zip(*(each for each, _ in by_rank))))
        cpu[partitions] = median(each for _, each in by_rank)
    group.release()
    return MessageCost(slope(wall), slope(cpu))


def slope(seconds_by_partitions: Mapping[int, float]) -> float:
    """Seconds for each further partition, at least 0: ``x`` of the least-squares fit of ``a + x n + b / n``.

    ``b / n`` is the time of the last partition alone: no partition follows it through the server.
    """
    counts = np.array(list(seconds_by_partitions), float)
    matrix = np.stack([np.ones_like(counts), counts, 1 / counts], axis=1)
    solution = np.linalg.lstsq(matrix, np.array(list(seconds_by_partitions.values())), rcond=None)[0]
    return max(0.0, float(solution[1]))


MIN_BYTES = 64_000
MAX_BYTES = 4_000_000

#: Values for collectives: partitions in the credit, partitions that count as committed, and the share of a partition's CPU time
#: that counts. They are fitted to a few noisy runs, not derived, and not known to be the best. Over gloo with 4 workers they
#: choose 0.34 MB, which reached 0.968 of T*.
_COLLECTIVES = 4
_COMMITTED_COLLECTIVES = 8
_COUNTED_SHARE = 0.5


def choose(
    partition: str,
    credit: str,
    layers: Sequence[LayerTimes],
    seconds_per_byte: float,
    cost: MessageCost,
    workers: int,
    servers: int,
    ordered: bool = False,
) -> tuple[int, int]:
    """Partition and credit in bytes. Each argument is a size, or ``"auto"`` to choose it.

    The best partition, from 64 KB to 4 MB, balances the cost of messages against the partitions that are already committed when
    an urgent one arrives (``lower_bound.best_partition``). The credit is two partitions for each shard. It is eight for each
    separate server, because all traffic to a separate server crosses the network. With this credit no shard waits for another
    shard or for returning credit. For collectives the credit is four partitions.

    Args:
        layers: layer times of each rank; the median of the ranks' best partitions is taken.
        seconds_per_byte: seconds per byte of gradient on the busiest link.
        cost: cost of one partition, besides its bytes.
        servers: number of separate servers; 0 means a shard on every worker.
        ordered: whether partitions are averaged by collectives, in an agreed order.
    """
    partition_bytes = parse_bytes(partition, "partition") if partition != "auto" else 0
    if not partition_bytes:
        # Committed partitions: one on the way to each shard, the next one, and one that a server passes on. Lanes to separate
        # servers share the links in both directions: in each direction every lane has one on its way and one in the kernel.
        messages = _COMMITTED_COLLECTIVES if ordered else 4 * servers if servers else workers + 2
        sizes = sorted(
            best_partition(
                each.forward_seconds,
                each.backward_seconds,
                each.nbytes,
                seconds_per_byte,
                cost.link_seconds,
                messages,
                cost.cpu_seconds * (_COUNTED_SHARE if ordered else 1),
            )
            for each in layers
        )
        partition_bytes = min(MAX_BYTES, max(MIN_BYTES, round(sizes[len(sizes) // 2])))
    if credit != "auto":
        return partition_bytes, parse_bytes(credit, "credit")
    return partition_bytes, (_COLLECTIVES if ordered else 8 * servers or 2 * workers) * partition_bytes
