"""Reads the input files of a report: results in one JSON document, or the lines of a sweep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commsched import ConfigError

from ..harness.results import SCHEMA
from ..harness.sweep_log import read_cells
from .result import Result, parse_result

Environment = Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """A sweep's cell without results."""

    options: str
    error: str


@dataclass(frozen=True)
class Read:
    """The contents of the files. ``environments`` has one item for each document or cell."""

    results: Sequence[Result]
    environments: Sequence[Environment]
    failures: Sequence[Failure]


def read_files(paths: Iterable[Path]) -> Read:
    """All rows of all files, in order.

    Raises:
        ConfigError: a file cannot be read or is not in the benchmarks' format, or there is no row; the message names file and
            row.
    """
    results: list[Result] = []
    environments: list[Environment] = []
    failures: list[Failure] = []
    for path in paths:
        for where, rows, environment in _documents(path, failures):
            environments.append(environment)
            results += [_result(f"{where}, row {number}", row) for number, row in enumerate(rows, start=1)]
    if not results:
        raise ConfigError("there are no rows to report")
    return Read(results, environments, failures)


def _documents(path: Path, failures: list[Failure]) -> Iterable[tuple[str, Sequence[object], Environment]]:
    if path.suffix != ".jsonl":
        yield str(path), *_document(path)
        return
    for number, cell in enumerate(read_cells(path), start=1):
        if cell.error is None:
            yield f"{path}, cell {number}", cell.rows, cell.environment
        else:
            failures.append(Failure(", ".join(f"{name}={value}" for name, value in cell.key.items()), cell.error))


def _document(path: Path) -> tuple[Sequence[object], Environment]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict) or not {"schema", "environment", "rows"} <= document.keys():
        raise ConfigError(f"{path}: not results of a benchmark: those have schema, environment and rows")
    if document["schema"] != SCHEMA:
        raise ConfigError(f"{path}: has schema {document['schema']!r}, but this program knows schema {SCHEMA}")
    if not isinstance(document["rows"], list) or not isinstance(document["environment"], dict):
        raise ConfigError(f"{path}: rows is not a list, or environment not an object")
    return document["rows"], document["environment"]


def _result(where: str, row: object) -> Result:
    try:
        return parse_result(row)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
