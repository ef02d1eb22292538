"""What averaging one byte of gradient puts on the busiest network interface. Pure."""

from __future__ import annotations


def bytes_factor(workers: int, servers: int = 0) -> float:
    """Bytes that the busiest NIC carries in each direction per byte of gradient, full duplex, load spread evenly.

    ``servers=0``: every worker hosts a shard of the parameter server, ``2 (n - 1) / n``, as in a ring all-reduce. ``k``
    servers on machines of their own: ``max(1, n / k)`` (Y. Jiang et al., "BytePS", OSDI 2020, section 2).

    Raises:
        ValueError: ``workers`` is less than 1, or ``servers`` less than 0.
    """
    if workers < 1 or servers < 0:
        raise ValueError(f"a job has at least 1 worker and 0 servers, not {workers} and {servers}")
    if servers == 0:
        return 2 * (workers - 1) / workers
    return max(1.0, workers / servers)
