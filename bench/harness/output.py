"""The output of a comparison: its table, warnings, and the result file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .results import write
from .rows import Row, disturbed, wrong


def end(rows: Sequence[Row], text: str, json: Path | None) -> int:
    """Print ``text`` and the warnings about ``rows``, and write the rows to ``json``. Returns the exit code, which is 1 if
    weights are wrong."""
    print(text)
    mistakes = wrong(rows)
    for sentence in [*disturbed(rows), *mistakes]:
        print(sentence, file=sys.stderr)
    if json:
        write(json, rows)
    return 1 if mistakes else 0
