"""Cuts a manifest into partitions. A partition is the unit of scheduling, preemption, credit and wire message."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .manifest import ITEMSIZE, Manifest

# A merged partition waits for its last gradient, so it stays well below the partition: a quarter of it. Below the least size
# an average costs its message rather than its bytes, and merging costs no time.
_FUSED_SHARE = 1 / 4
_FUSED_LEAST_BYTES = 64_000


@dataclass(frozen=True, slots=True)
class Partition:
    """One contiguous range of one dtype's flat buffer.

    ``index`` is its place in forward order and therefore its priority: 0 is needed first. ``start`` and ``stop`` are bytes
    in the flat buffer of ``dtype``; ``tensors`` are the indices of the tensors that have elements in it.
    """

    index: int
    dtype: str
    start: int
    stop: int
    tensors: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """The partitions of one manifest, the same on every rank."""

    manifest: Manifest
    partitions: tuple[Partition, ...]

    @cached_property
    def by_tensor(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the partitions that each tensor has elements in. Empty for a tensor without elements."""
        owners: list[list[int]] = [[] for _ in self.manifest.tensors]
        for partition in self.partitions:
            for tensor in partition.tensors:
                owners[tensor].append(partition.index)
        return tuple(tuple(indices) for indices in owners)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the manifest and the borders of all partitions."""
        borders = [[p.dtype, p.start, p.stop] for p in self.partitions]
        return hashlib.sha256(f"{self.manifest.fingerprint}{json.dumps(borders)}".encode()).hexdigest()


def cut(manifest: Manifest, partition_bytes: int, fusion_bytes: int | None = None) -> Plan:
    """Cut ``manifest`` into partitions of at most ``partition_bytes`` (at least one element).

    A tensor larger than ``partition_bytes`` is split into near-equal pieces on element borders. Consecutive smaller tensors
    of one dtype are packed as long as they have at most ``fusion_bytes`` together; ``None`` means a quarter of
    ``partition_bytes``, at least 64 KB. Tensors are not packed if ``manifest.shares_partitions`` is False. Rows of norms
    (``manifest.norms``) are one partition each.
    Pure: equal arguments give equal plans on every rank.
    """
    if manifest.norms is not None:
        return Plan(manifest, tuple(_whole(manifest)))
    pack_bytes = merged_bytes(partition_bytes, fusion_bytes)
    if not manifest.shares_partitions:
        pack_bytes = 0
    partitions: list[Partition] = []
    packed: list[int] = []

    def close_pack() -> None:
        if packed:
            first, last = packed[0], packed[-1]
            stop = manifest.offset(last) + manifest.tensors[last].nbytes
            dtype = manifest.tensors[first].dtype
            partitions.append(Partition(len(partitions), dtype, manifest.offset(first), stop, tuple(packed)))
            packed.clear()

    for index, spec in enumerate(manifest.tensors):
        if spec.nbytes == 0:
            continue
        if packed:
            first = manifest.tensors[packed[0]]
            packed_bytes = manifest.offset(packed[-1]) + manifest.tensors[packed[-1]].nbytes - manifest.offset(packed[0])
            if first.dtype != spec.dtype or packed_bytes + spec.nbytes > pack_bytes:
                close_pack()
        if spec.nbytes <= partition_bytes:
            packed.append(index)
            continue
        for start, stop in _split(spec.numel, max(1, partition_bytes // ITEMSIZE[spec.dtype])):
            base, size = manifest.offset(index), ITEMSIZE[spec.dtype]
            partitions.append(Partition(len(partitions), spec.dtype, base + start * size, base + stop * size, (index,)))
    close_pack()
    return Plan(manifest, tuple(partitions))


def merged_bytes(partition_bytes: int, fusion_bytes: int | None) -> int:
    """The largest size of merged neighbours, by these arguments of :func:`cut`."""
    if fusion_bytes is None:
        fusion_bytes = max(_FUSED_LEAST_BYTES, int(partition_bytes * _FUSED_SHARE))
    return min(fusion_bytes, partition_bytes)


def _whole(manifest: Manifest) -> Iterator[Partition]:
    """A partition for each tensor, with the tensor's index. So row ``k`` of norms goes to server ``k``: see :func:`place`."""
    for index, spec in enumerate(manifest.tensors):
        start = manifest.offset(index)
        yield Partition(index, spec.dtype, start, start + spec.nbytes, (index,))


def _split(numel: int, most: int) -> Iterator[tuple[int, int]]:
    """Borders of the fewest pieces of at most ``most`` elements whose sizes differ by at most one."""
    pieces = -(-numel // most)
    for piece in range(pieces):
        yield numel * piece // pieces, numel * (piece + 1) // pieces


def place(partition: int, servers: int) -> int:
    """The server, 0 to ``servers - 1``, of the partition with this index.

    Every rank computes the same server from the index alone, so placement needs no message and survives re-cutting.
    Partitions are near-equal in size, so each round of ``servers`` consecutive partitions uses every server once. The rounds
    are shifted against each other because plans are often periodic: with plain ``partition % servers`` and two servers, a
    model whose layers are cut into a large weight and a small bias would send all weights to one server.
    """
    return (partition + partition // servers) % servers
