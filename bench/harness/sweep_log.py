"""The file of a sweep: one line of JSON for every cell that was tried, written when the cell ended. The last line of a cell
counts.

A line is ``{"schema", "key", "rows", "environment", "wall_seconds", "error"}``. ``key`` holds the options that decide the
result. Either ``rows`` is not empty or ``error`` describes the error. An incomplete last line, left by a kill, is dropped.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from commsched import ConfigError

from .results import Row

#: Version of the layout of a line.
SCHEMA = 1


@dataclass(frozen=True)
class Cell:
    """One combination of options and its result."""

    key: Mapping[str, Any]
    rows: Sequence[Row]
    environment: Mapping[str, Any]
    wall_seconds: float
    error: str | None = None

    @property
    def identity(self) -> str:
        return identity(self.key)


def identity(key: Mapping[str, Any]) -> str:
    """A text that is equal for equal keys."""
    return json.dumps(key, sort_keys=True)


def read_cells(path: Path) -> list[Cell]:
    """The last state of each cell, in the order in which they were first tried.

    Raises:
        ConfigError: the file cannot be read, or a line other than a torn last one is not a cell; names file and line.
    """
    return _parse(path, _read(path))[0]


class SweepLog:
    """A sweep's file, open for adding cells, and locked: two sweeps on one machine would disturb each other's figures.

    Raises:
        ConfigError: see :func:`read_cells`; also if another process has the file open.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab")  # until __exit__
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        try:
            self._lock(path)
            cells, whole_bytes = _parse(path, _read(path))
            self._file.truncate(whole_bytes)
        except BaseException:
            self._file.close()
            raise
        self.cells = {cell.identity: cell for cell in cells}

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{path} is being written by another sweep") from None

    def add(self, cell: Cell) -> None:
        """Write ``cell`` durably, so that it survives the end of this process."""
        line = json.dumps({"schema": SCHEMA, **asdict(cell)}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.cells[cell.identity] = cell

    def __enter__(self) -> SweepLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _parse(path: Path, content: bytes) -> tuple[list[Cell], int]:
    """The cells, and the number of bytes of ``content`` in complete lines."""
    whole_bytes = content.rfind(b"\n") + 1
    cells: dict[str, Cell] = {}
    for number, line in enumerate(content[:whole_bytes].splitlines(), start=1):
        cell = _cell(f"{path}, line {number}", line)
        cells[cell.identity] = cell
    return list(cells.values()), whole_bytes


def _cell(where: str, line: bytes) -> Cell:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict) or "schema" not in record:
        raise ConfigError(f"{where}: not a cell of a sweep")
    if record["schema"] != SCHEMA:
        raise ConfigError(f"{where}: has schema {record['schema']!r}, but this program knows schema {SCHEMA}; use another file")
    found = {name: value for name, value in record.items() if name != "schema"}
    wanted = {field.name for field in fields(Cell)}
    if found.keys() != wanted:
        raise ConfigError(f"{where}: a cell has {', '.join(sorted(wanted))}; here are {', '.join(sorted(found))}")
    for name, kind in (("key", dict), ("rows", list), ("environment", dict)):
        if not isinstance(found[name], kind):
            raise ConfigError(f"{where}: {name} is of type {type(found[name]).__name__}, not {kind.__name__}")
    return Cell(**found)
