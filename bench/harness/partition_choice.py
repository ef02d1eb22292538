"""Choice of partition and credit from measurements of layers and network. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from commsched.settings import parse_bytes

from ..lower_bound import best_partition
from .layers import LayerTimes
from .message_cost import MessageCost

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
    collective: bool = False,
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
        collective: whether partitions are averaged by collectives, in an agreed order.
    """
    partition_bytes = parse_bytes(partition, "partition") if partition != "auto" else 0
    if not partition_bytes:
        # Committed partitions: one on the way to each shard, the next one, and one that a server passes on. Lanes to separate
        # servers share the links in both directions: in each direction every lane has one on its way and one in the kernel.
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
        partition_bytes = min(MAX_BYTES, max(MIN_BYTES, round(sizes[len(sizes) // 2])))
    if credit != "auto":
        return partition_bytes, parse_bytes(credit, "credit")
    return partition_bytes, (_COLLECTIVES if collective else 8 * servers or 2 * workers) * partition_bytes
