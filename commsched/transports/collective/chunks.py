"""Which part of a partition each rank sums."""

from __future__ import annotations

from itertools import pairwise


def chunks_of(data: memoryview, itemsize: int, world_size: int) -> list[memoryview]:
    """``data``, of ``numel`` elements of ``itemsize`` bytes, as one chunk per rank: elements ``numel * r // world_size`` to
    ``numel * (r + 1) // world_size``. With fewer elements than ranks, some are empty."""
    numel = len(data) // itemsize
    borders = [numel * rank // world_size * itemsize for rank in range(world_size + 1)]
    return [data[start:stop] for start, stop in pairwise(borders)]
