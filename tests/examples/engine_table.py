"""The table of engines and transports in ``docs/plugins.md``, from the tests that ran in this checkout::

python -m tests.examples.engine_table          # writes it
python -m tests.examples.engine_table --check  # fails if the page has another one
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "plugins.md"
#: One file for each cell, so that tests side by side do not meet.
NOTES = ROOT / "runs" / "engines"
BEGIN, END = "<!-- engines and transports: begin -->\n", "<!-- engines and transports: end -->\n"


@dataclass(frozen=True)
class Cell:
    """Two ranks of ``engine`` over ``transport`` were within ``tolerance`` of one process, in ``dtype``."""

    engine: str
    transport: str
    dtype: str
    tolerance: float


def note(cell: Cell) -> None:
    """Keep that the test of ``cell`` has passed."""
    NOTES.mkdir(parents=True, exist_ok=True)
    (NOTES / f"{cell.engine}-{cell.transport}.json").write_text(json.dumps(asdict(cell)))


def noted() -> list[Cell]:
    """In the order of their names."""
    return [Cell(**json.loads(path.read_text())) for path in sorted(NOTES.glob("*.json"))]


def table(cells: Sequence[Cell]) -> str:
    """As Markdown, engines down and transports across."""
    engines = sorted({cell.engine for cell in cells})
    transports = sorted({cell.transport for cell in cells}, key=["ps", "mpi", "gloo"].index)
    found = {(cell.engine, cell.transport): f"{cell.dtype}, {cell.tolerance:g}" for cell in cells}
    lines = [["engine", *(f"`{transport}`" for transport in transports)], ["---"] * (len(transports) + 1)]
    lines += [[engine, *(found.get((engine, transport), "") for transport in transports)] for engine in engines]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(argv: Sequence[str]) -> int:
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    shown, end, after = rest.partition(END)
    if "--check" not in argv:
        PAGE.write_text(f"{before}{begin}{table(noted())}{end}{after}")
        return 0
    # Not every engine can be had with every Python: of those that could not, the page's rows are let stand.
    ran = {cell.engine for cell in noted()}
    found = [line for line in shown.splitlines() if line.split(" ")[1] in ran]
    wanted = [line for line in table(noted()).splitlines() if line.split(" ")[1] in ran]
    if ran and found == wanted:
        return 0
    print(f"{PAGE.name} has another table than the tests that ran give:\n{table(noted())}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
