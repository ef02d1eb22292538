"""How a comparison ends: its table, what is wrong with it, and the file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..results import write
from .rows import Row, disturbed, wrong


def end(rows: Sequence[Row], text: str, json: Path | None) -> int:
    """Print ``text`` and what is to be known of ``rows``, and write them to ``json``; the exit code, 1 if weights are wrong."""
    print(text)
    mistakes = wrong(rows)
    for sentence in [*disturbed(rows), *mistakes]:
        print(sentence, file=sys.stderr)
    if json:
        write(json, rows)
    return 1 if mistakes else 0
