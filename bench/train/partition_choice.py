"""Partition and credit from what was measured of layers and network. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from commsched.core.config import parse_bytes

from ..layers import LayerTimes
from ..lower_bound import best_partition
from .message_cost import MessageCost

LEAST_BYTES = 64_000
MOST_BYTES = 4_000_000

#: Of collectives: partitions in the credit, partitions that count as not to be called back, and the share of a partition's
#: processor time that counts. Fitted to a few noisy runs, not derived, and not known to be the best. Over gloo with 4 workers
#: they choose 0.34 MB, with which 0.968 of T* was reached.
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
    collective: bool = False,
) -> tuple[int, int]:
    """Partition and credit in bytes; each as given, or ``"auto"``.

    The best partition balances what messages cost against what cannot be called back (``lower_bound.best_partition``), from
    64 KB to 4 MB. The credit is two partitions for each shard, or eight for each separate server, which nothing of a
    worker's reaches without the network: none waits for another, nor for credit to come back. For collectives it is four.

    Args:
        layers: of each rank; the median of what suits them is taken.
        seconds_per_byte: of gradient, on the busiest link.
        cost: of a partition by itself.
        servers: separate ones; 0: a shard on every worker.
        collective: partitions are averaged by collectives, in an order agreed on.
    """
    partition_bytes = parse_bytes(partition, "partition") if partition != "auto" else 0
    if not partition_bytes:
        # On the way to each shard, one that comes next, and one that a server passes on. Lanes to separate servers share the
        # links both ways: in each direction one is on its way on every lane, and one behind it is in the kernel.
        messages = _COMMITTED_COLLECTIVES if collective else 4 * servers if servers else workers + 2
        sizes = sorted(
            best_partition(
                each.forward_seconds,
                each.backward_seconds,
                each.nbytes,
                seconds_per_byte,
                cost.link_seconds,
                messages,
                cost.cpu_seconds * (_COUNTED_SHARE if collective else 1),
            )
            for each in layers
        )
        partition_bytes = min(MOST_BYTES, max(LEAST_BYTES, round(sizes[len(sizes) // 2])))
    if credit != "auto":
        return partition_bytes, parse_bytes(credit, "credit")
    return partition_bytes, (_COLLECTIVES if collective else 8 * servers or 2 * workers) * partition_bytes
