"""The part of a partition that each rank sums."""

from __future__ import annotations

from itertools import pairwise


def chunks_of(data: memoryview, itemsize: int, world_size: int) -> list[memoryview]:
    """Split ``data``, which holds ``numel`` elements of ``itemsize`` bytes, into one chunk per rank.

    The chunk of rank ``r`` holds elements ``numel * r // world_size`` to ``numel * (r + 1) // world_size``. With fewer elements
    than ranks, some chunks are empty.
    """
    numel = len(data) // itemsize
    borders = [numel * rank // world_size * itemsize for rank in range(world_size + 1)]
    return [data[start:stop] for start, stop in pairwise(borders)]
