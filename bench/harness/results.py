"""The results of a benchmark: rows of figures and the environment of the measurement, as JSON and as a table."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import INSTALLED

#: Version of the layout of the JSON: ``{"schema", "environment", "rows"}``.
SCHEMA = 1

Row = Mapping[str, Any]

#: Facts that may differ between measurements with one program on one machine. The profile is that of a sweep's cell.
_OF_THE_MOMENT = frozenset({"time", "command", "load_average", "profile"})
_ROOT = Path(__file__).parents[2]
_PACKAGES = ("commsched", "numpy", "grpcio", "torch", "mpi4py")


def is_written_in_place(path: Path) -> bool:
    """Whether ``path`` is there and must stay what it is, such as a pipe or /dev/stdout. Other files are replaced."""
    return path.exists() and (not path.is_file() or path.is_relative_to("/dev") or path.is_relative_to("/proc"))


def write(path: Path | None, rows: Sequence[Row], measured_in: Mapping[str, Any] | None = None) -> None:
    """Write ``rows`` and the environment to ``path``, whole or not at all. Without a path it does nothing.

    Args:
        measured_in: the environment of the measurement, if the rows are not from this run.
    """
    if path is None:
        return
    found = environment() if measured_in is None else dict(measured_in)
    document = {"schema": SCHEMA, "environment": found, "rows": [dict(row) for row in rows]}
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if is_written_in_place(path):
        path.write_text(text)  # /dev/stdout, say, must not be replaced, whatever it leads to
        return
    path = path.resolve()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _command() -> list[str]:
    """This process's command line, as a user may type it."""
    program = Path(sys.argv[0])
    named = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return [*named, *sys.argv[1:]]


def environment() -> dict[str, Any]:
    """The facts that a reader needs to judge the figures: versions, processor, cores, commit, command line, time."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "commit": commit(),
    }


def lasting(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an :func:`environment` that stays the same between measurements on one machine with one program."""
    return {name: value for name, value in environment.items() if name not in _OF_THE_MOMENT}


def say_foreign(count: int, what: str, keep: bool) -> None:
    """Say on stderr what happens to so many results that were not measured here and now, if there are any."""
    if count:
        then = "they are kept as they are" if keep else "so they are measured again; --keep keeps them"
        print(f"{count} {what} are of another commit, machine or version{';' if keep else ','} {then}", file=sys.stderr)


def table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """``rows`` as text; ``columns`` maps a row's key to its heading. Cells are right-aligned; a missing value is
    ``-``."""
    cells = [list(columns.values())] + [[_cell(row.get(key)) for key in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


def markdown_table(rows: Sequence[Mapping[str, str]], headings: Sequence[str]) -> str:
    """``rows`` by heading, as Markdown."""
    lines = [headings, ["---"] * len(headings), *([row[heading] for heading in headings] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def commit() -> str | None:
    """The commit of the working tree, with a ``+`` and a digest of the changes if files differ from it, or there are files of
    Python that are new; None outside a repository.

    An installed package has no commit, although the directory that holds it may be in somebody's repository.
    """
    if INSTALLED:
        return None
    try:
        sha = _git("rev-parse", "HEAD")
        new = _git("ls-files", "-z", "--others", "--exclude-standard", "--", "*.py").split("\0")[:-1]
        if not new and not _git("status", "--porcelain", "--untracked-files=no"):
            return sha
        changes = [_git("diff", "HEAD"), *(path + _text_of(_ROOT / path) for path in new)]
        return f"{sha}+{hashlib.blake2b(json.dumps(changes).encode(), digest_size=4).hexdigest()}"
    except (OSError, subprocess.SubprocessError):
        return None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # a link that leads nowhere
        return ""


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=_ROOT, check=True, capture_output=True, text=True, errors="replace", timeout=10
    )
    return done.stdout.strip()
