"""A directory for the files of one job's ranks, on one machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def shared_directory() -> Iterator[str]:
    """Rank 0's, removed once all ranks have left the block. Collective."""
    with tempfile.TemporaryDirectory() as directory:
        names = [directory]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()
