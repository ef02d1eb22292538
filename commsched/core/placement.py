"""Which server a partition goes to."""

from __future__ import annotations


def place(partition: int, servers: int) -> int:
    """The server, 0 to ``servers - 1``, of the partition with this index.

    Every rank computes the same from the index alone, so placement needs no message and survives re-cutting. Partitions
    are near-equal in size, so each round of ``servers`` consecutive ones goes to every server once. The rounds are shifted
    against each other because plans are often periodic: with plain ``partition % servers`` and two servers, a model whose
    layers are cut into a large weight and a small bias would send all weights to one server.
    """
    return (partition + partition // servers) % servers
