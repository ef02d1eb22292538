"""The tables of ``docs/transports.md``: each transport under the same benchmarks, in one run.

Each measurement is a command of ``python -m bench``. If it succeeds and its results are correct, they are written to a file in
the given directory. A measurement whose file exists is not repeated, unless it is of another commit, machine or version. A
stopped run therefore continues, and a single measurement is repeated by removing its file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import PROGRAM
from .harness import results
from .harness.arguments import add_options, new_directory
from .harness.results import SCHEMA, Row, lasting, markdown_table

_ALL = ("ps", "gloo", "mpi")
_RATE = "500mbit"

#: The columns of a table: by heading, a key of the row, or a function that formats the row.
Columns = Mapping[str, str | Callable[[Row], str]]


def _number(key: str, digits: int, factor: float = 1.0) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        return "-" if row[key] is None else f"{factor * row[key]:.{digits}f}"

    return text


def _step(row: Row) -> str:
    median, low, high = (1e3 * row["step_seconds"][key] for key in ("median", "low", "high"))
    return f"{median:.0f} [{low:.0f}, {high:.0f}]"


def _transport(row: Row) -> str:
    usual = {"policy": "priority", "collective": "auto", "wire": "none"}
    extra = [row[key] for key in usual if row[key] != usual[key]]
    return " ".join([row["transport"], *extra])


_TRAIN: Columns = {
    "system": "system",
    "runs with": "config",
    "ms per step": _step,
    "T* ms": _number("bound_seconds", 0, 1e3),
    "T*/T": _number("efficiency", 3),
    "over DDP": _number("speedup_vs_ddp", 2),
    "CPU s per step": _number("cpu_seconds_per_step", 2),
}
_COLLECTIVES: Columns = {
    "transport": _transport,
    "size (B)": "size_bytes",
    "ms": _number("milliseconds", 2),
    "MB/s": _number("algbw_megabytes_per_second", 0),
    "of link": _number("link_share", 3),
    "CPU s/GB of gradient": _number("cpu_seconds_per_gigabyte", 2),
}
_HIERARCHY: Columns = {"transport": "transport", "hierarchy": "hierarchy", **dict(list(_COLLECTIVES.items())[1:])}
_IDLE: Columns = {
    "transport": "transport",
    "rank": "rank",
    "idle, % of a core": _number("idle_share", 2, 100),
    "waiting, % of a core": _number("waiting_share", 2, 100),
}
_AGREEMENT: Columns = {
    "order": "order",
    "credit, partitions": "credit_partitions",
    "ms per step": _number("milliseconds", 1),
    "of link": _number("link_share", 3),
    "CPU us per launch": _number("cpu_microseconds_per_launch", 0),
    "messages per launch": _number("messages_per_launch", 2),
}


@dataclass(frozen=True)
class Table:
    """A table. ``commands`` are arguments of ``python -m bench``."""

    title: str
    columns: Columns
    commands: Sequence[str]


def tables(rounds: int) -> list[Table]:
    """The tables to measure. ``rounds`` is the number of turns of each system that trains."""
    systems = "ddp,ddp-tuned,commsched:ps," + ",".join(f"commsched:{name}" for name in _collective(["", "+static", "+rsag"]))
    train = f"train --model uniform --bandwidth {_RATE} --rounds {rounds} --steps 5 --systems {systems} --timeout 3600"
    sizes = "--sizes 64KB,1MB,4MB,64MB"
    agreement = f"agreement --bandwidth {_RATE}"
    shared = f"collectives --workers 4 --ranks-per-host 2 --bandwidth {_RATE} --sizes 16MB"
    return [
        *(Table(f"Training, {workers} workers", _TRAIN, [f"{train} --workers {workers}"]) for workers in (2, 4)),
        Table("One tensor, 2 workers, loopback", _COLLECTIVES, [f"collectives --transport {name} {sizes}" for name in _ALL]),
        Table(
            f"One tensor, 2 workers, links of {_RATE}",
            _COLLECTIVES,
            [f"collectives --bandwidth {_RATE} --sizes 16MB --transport {name}" for name in (*_ALL, *_in_16_bits())],
        ),
        Table(
            f"2 hosts with links of {_RATE}, 2 ranks on each",
            _HIERARCHY,
            [f"{shared} --hierarchy {switch} --transport {name}" for name in _ALL for switch in ("off", "on")],
        ),
        Table("Processor time while nothing happens, 2 workers", _IDLE, [f"idle --transport {name}" for name in _ALL]),
        *(
            Table(
                f"Agreement over {name}, 2 workers, links of {_RATE}",
                _AGREEMENT,
                [f"{agreement} --transport {name}"],
            )
            for name in _ALL[1:]
        ),
    ]


def _collective(options: Iterable[str]) -> list[str]:
    return [f"{name}{option}" for name in _ALL[1:] for option in options]


def _in_16_bits() -> list[str]:
    return [f"{name} --wire bfloat16" for name in _ALL]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=new_directory, required=True, metavar="DIRECTORY", help="for results; it goes on from them"
    )
    parser.add_argument(
        "--keep", action="store_true", help="also the results that another commit, machine or version measured, as they are"
    )
    add_options(parser, rounds=3)


def run(args: argparse.Namespace) -> int:
    """Run. Returns 0 if everything could be measured and all results were correct."""
    args.out.mkdir(parents=True, exist_ok=True)
    here = lasting(results.environment())
    paths = [args.out / _file_name(command) for table in tables(args.rounds) for command in table.commands]
    results.say_foreign(sum(_is_there(path, None) and not _is_there(path, here) for path in paths), "results", args.keep)
    failed = []
    sections = []
    for table in tables(args.rounds):
        rows = []
        for command in table.commands:
            path = args.out / _file_name(command)
            if not _is_there(path, None if args.keep else here) and not _measured(command, path):
                failed.append(command)
            else:
                rows += _rows(path)
        sections.append(_section(table, rows))
        (args.out / "tables.md").write_text("\n".join(sections))
    print(f"{args.out / 'tables.md'}: {len(sections)} tables")
    for command in failed:
        print(f"failed: {PROGRAM} {command}", file=sys.stderr)
    return 1 if failed else 0


def _measured(command: str, path: Path) -> bool:
    """Run ``command``; return whether it succeeded. If not, its results are removed, because some benchmarks write them
    anyway."""
    from .__main__ import INTERRUPTED, main

    print(f"{PROGRAM} {command}", flush=True)
    unjudged = path.with_name(f".unjudged-{path.name}")
    try:
        code = main([*shlex.split(command), "--json", str(unjudged)])
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code != 0:
            return False
        unjudged.replace(path)
        return True
    finally:
        unjudged.unlink(missing_ok=True)


def _is_there(path: Path, here: Mapping[str, Any] | None) -> bool:
    """Whether a result is there, measured ``here`` if that is given."""
    if not path.exists():
        return False
    found = json.loads(path.read_text())
    return found["schema"] == SCHEMA and (here is None or lasting(found["environment"]) == here)


def _rows(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["rows"])


def _section(table: Table, rows: Sequence[Row]) -> str:
    commands = "\n".join(f"{PROGRAM} {command}" for command in table.commands)
    shown = [{heading: _cell(what, row) for heading, what in table.columns.items()} for row in rows]
    return f"### {table.title}\n\n```sh\n{commands}\n```\n\n{markdown_table(shown, list(table.columns))}"


def _cell(what: str | Callable[[Row], str], row: Row) -> str:
    return str(row[what]) if isinstance(what, str) else what(row)


def _file_name(command: str) -> str:
    return f"{command.split()[0]}-{hashlib.blake2b(command.encode(), digest_size=6).hexdigest()}.json"
