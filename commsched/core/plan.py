"""Cuts a manifest into partitions. A partition is the unit of scheduling, preemption, credit and wire message."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapreplace

from .manifest import ITEMSIZE, Manifest

# Merged neighbours wait for their last gradient, so they stay well below the partition: a quarter of it. Below the least size
# an average costs its message rather than its bytes, and merging costs no time.
_FUSED_SHARE = 1 / 4
_FUSED_LEAST_BYTES = 64_000

# A server spends about as much time on a message as on so many bytes of it. So small partitions are spread by number too, and
# what has no more bytes needs no message of its own behind a larger tensor.
_BYTES_OF_A_MESSAGE = 16_000


@dataclass(frozen=True, slots=True)
class Partition:
    """One contiguous range of one dtype's flat buffer.

    ``index`` is its place in forward order and therefore its priority: 0 is needed first. ``start`` and ``stop`` are bytes
    in the flat buffer of ``dtype``; ``tensors`` are the indices of the tensors that have elements in it. ``server`` makes its
    average, if servers do: each partition is on one of them.
    """

    index: int
    dtype: str
    start: int
    stop: int
    tensors: tuple[int, ...]
    server: int = 0

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


def cut(manifest: Manifest, partition_bytes: int, fusion_bytes: int | None = None, servers: int = 1) -> Plan:
    """Cut ``manifest`` into partitions of at most ``partition_bytes`` (at least one element), and spread them over ``servers``.

    A tensor larger than ``partition_bytes`` is split into near-equal pieces on element borders. If these are more than
    ``servers``, their number becomes a multiple of it, unless they would be more than a third more: a layer is averaged when
    the server with the most of it is done. Consecutive smaller tensors of one dtype are packed as long as they have at most
    ``fusion_bytes`` together. ``None`` means a quarter of ``partition_bytes``, at least 64 KB. With ``None`` tensors that
    follow a larger one, such as a layer's bias, are also packed with that one, or its last piece, as long as they have at most
    16 KB together and there is room in the partition: a message of their own would cost more. They wait for the larger
    gradient, which backward makes at about the same time. Tensors are not packed if ``manifest.shares_partitions`` is False.

    Rows of norms (``manifest.norms``) are one partition each, and row ``k`` is on server ``k``. Other partitions are on the
    server that has the fewest bytes of those in front of them, where each counts 16 KB for its messages (list scheduling;
    Graham, SIAM J. Appl. Math. 1969). So any stretch of the order loads all servers, and the links to them, equally, within two
    partitions.

    Pure: equal arguments give equal plans on every rank, without a message.
    """
    if manifest.norms is not None:
        return Plan(manifest, tuple(_whole(manifest)))
    pack_bytes = merged_bytes(partition_bytes, fusion_bytes)
    if not manifest.shares_partitions:
        pack_bytes = 0
    behind_bytes = _BYTES_OF_A_MESSAGE if fusion_bytes is None and pack_bytes else 0
    ranges: list[_Range] = []
    for index, spec in enumerate(manifest.tensors):
        if spec.nbytes == 0:
            continue
        start, size = manifest.offset(index), ITEMSIZE[spec.dtype]
        stop = start + spec.nbytes
        last = ranges[-1] if ranges else None
        if last is not None and last.dtype == spec.dtype:
            first = last.tensors[0]
            first_start = manifest.offset(first)
            fits_pack = stop - last.start <= pack_bytes and last.start == first_start  # it is no piece of a larger tensor
            behind = stop - first_start - manifest.tensors[first].nbytes
            if fits_pack or (stop - last.start <= partition_bytes and behind <= behind_bytes):
                last.tensors.append(index)
                last.stop = stop
                continue
        pieces = _split(spec.numel, partition_bytes // size, servers)
        ranges += (_Range(spec.dtype, start + begin * size, start + end * size, [index]) for begin, end in pieces)
    partitions = (Partition(index, each.dtype, each.start, each.stop, tuple(each.tensors)) for index, each in enumerate(ranges))
    return Plan(manifest, tuple(_spread(partitions, servers)))


@dataclass(slots=True)
class _Range:
    """The range of a partition, to which tensors may be added."""

    dtype: str
    start: int
    stop: int
    tensors: list[int]


def merged_bytes(partition_bytes: int, fusion_bytes: int | None) -> int:
    """The largest size of merged neighbours by these arguments of :func:`cut`, without those that go with a larger tensor."""
    if fusion_bytes is None:
        fusion_bytes = max(_FUSED_LEAST_BYTES, int(partition_bytes * _FUSED_SHARE))
    return min(fusion_bytes, partition_bytes)


def _whole(manifest: Manifest) -> Iterator[Partition]:
    """A partition for each tensor, with the tensor's index, on the server of that number."""
    for index, spec in enumerate(manifest.tensors):
        start = manifest.offset(index)
        yield Partition(index, spec.dtype, start, start + spec.nbytes, (index,), server=index)


def _spread(partitions: Iterable[Partition], servers: int) -> Iterator[Partition]:
    """Give each partition to the server that has the least so far, of those the first."""
    loads = [(0, server) for server in range(servers)]  # a heap: the bytes of each server
    for partition in partitions:
        nbytes, server = loads[0]
        heapreplace(loads, (nbytes + partition.nbytes + _BYTES_OF_A_MESSAGE, server))
        yield replace(partition, server=server) if server else partition


def _split(numel: int, most: int, servers: int) -> Iterator[tuple[int, int]]:
    """Borders of pieces of at most ``most`` elements, at least one, whose sizes differ by at most one: the fewest, or a
    multiple of ``servers`` that is at most a third more."""
    pieces = -(-numel // max(1, most))
    multiple = -(-pieces // servers) * servers
    if servers < pieces and 3 * multiple <= 4 * pieces:
        pieces = min(multiple, numel)
    for piece in range(pieces):
        yield numel * piece // pieces, numel * (piece + 1) // pieces
