"""Ranks that are processes on machines of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence


def ends_of(ranks: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Wait for the end of each process. Return its exit code and stderr."""
    try:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]
