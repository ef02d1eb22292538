"""How a manifest is cut into partitions: the unit of scheduling, preemption, credit and wire message."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .manifest import ITEMSIZE, Manifest


@dataclass(frozen=True, slots=True)
class Partition:
    """One contiguous range of one dtype's flat buffer.

    ``index`` is its place in forward order and thereby its priority: 0 is needed first. ``start`` and ``stop`` are bytes
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
        """For each tensor, the indices of the partitions it has elements in. Empty for a tensor without elements."""
        owners: list[list[int]] = [[] for _ in self.manifest.tensors]
        for partition in self.partitions:
            for tensor in partition.tensors:
                owners[tensor].append(partition.index)
        return tuple(tuple(indices) for indices in owners)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the manifest and every border."""
        borders = [[p.dtype, p.start, p.stop] for p in self.partitions]
        return hashlib.sha256(f"{self.manifest.fingerprint}{json.dumps(borders)}".encode()).hexdigest()


def cut(manifest: Manifest, partition_bytes: int, fusion_bytes: int | None = None) -> Plan:
    """Cut ``manifest`` into partitions of at most ``partition_bytes`` (at least one element).

    A tensor larger than ``partition_bytes`` is split into near-equal pieces on element borders; consecutive smaller
    tensors of one dtype are packed until they would be more than ``fusion_bytes`` (None: ``partition_bytes``) with the next,
    unless ``manifest`` does not want that.
    Pure: equal arguments give equal plans on every rank.
    """
    pack_bytes = partition_bytes if fusion_bytes is None else min(fusion_bytes, partition_bytes)
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


def _split(numel: int, most: int) -> Iterator[tuple[int, int]]:
    """Borders of the fewest pieces of at most ``most`` elements whose sizes differ by at most one."""
    pieces = -(-numel // most)
    for piece in range(pieces):
        yield numel * piece // pieces, numel * (piece + 1) // pieces
