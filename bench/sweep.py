"""``python -m bench sweep``: ``bench train`` over a product of options, cell by cell. A sweep can continue from its file.

Each finished cell is written to the file before the next begins. Cells in the file are not measured again, unless they are from
another commit, machine or version, or the file of their profile has changed. Failed cells are tried again. Cells in the file
that are not in this product are kept unchanged. A cell that cannot be measured here, by its options, ends the sweep before it
begins.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commsched import ConfigError

from . import turns as train
from .harness import results
from .harness.arguments import require_extra
from .harness.results import lasting
from .harness.sweep_log import Cell, SweepLog, identity
from .turns import TrainOptions
from .workloads import profile_digest

if TYPE_CHECKING:
    from tqdm import tqdm


#: Options that take several values and span the product.
SWEPT = ("model", "workers", "servers", "bandwidth", "rho", "partition", "credit")

#: Options that decide when to give up; they do not affect the measurement.
_NO_PART_OF_THE_KEY = ("timeout_seconds",)

Measure = Callable[[TrainOptions], list[dict[str, Any]]]
Check = Callable[[TrainOptions], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench train``, some of which take lists here."""
    parser.conflict_handler = "resolve"
    train.add_arguments(parser)
    swept = parser.add_argument_group("swept", "each takes a list, A,B,...; every combination is a cell")
    for name in SWEPT:
        default = getattr(TrainOptions(), name)
        text = f"as bench train, a list{'' if default is None else f' (default: {default})'}"
        text += "; 500mbit/250mbit/... gives each host its own" if name == "bandwidth" else ""
        swept.add_argument(f"--{name}", type=_values_of(name), default=(default,), metavar="A,...", help=text)
    parser.add_argument(
        "--keep", action="store_true", help="also the cells that another commit, machine or version measured, as they are"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.jsonl", help="a line per finished cell; goes on from it"
    )


def run(args: argparse.Namespace, measure: Measure = train.measure_rows, check: Check = train.plan_of) -> int:
    """Run the sweep. Returns 0 if in the end every cell has correct rows; otherwise 1."""
    require_extra("report", "tqdm")
    options = cells_of(args)
    with SweepLog(args.out) as log:
        _check_options(args.out, log)
        _sweep(options, log, measure, check, args.keep)
        cells = [log.cells[identity(key_of(option))] for option in options]
    if args.json:
        _write_json(args.json, args.out, cells)
    return _conclude(cells, args.out)


def cells_of(args: argparse.Namespace) -> list[TrainOptions]:
    """The cells of the product, without repetitions; the last option changes fastest."""
    combinations = product(*(getattr(args, name) for name in SWEPT))
    options = (train.options_of(argparse.Namespace(**{**vars(args), **dict(zip(SWEPT, each))})) for each in combinations)
    return list(dict.fromkeys(options))


def key_of(options: TrainOptions) -> dict[str, Any]:
    """The options that decide the result, as JSON values."""
    key = {name: value for name, value in asdict(options).items() if name not in _NO_PART_OF_THE_KEY}
    return {**key, "systems": list(options.systems)}


def _check_options(path: Path, log: SweepLog) -> None:
    known = key_of(TrainOptions()).keys()
    for cell in log.cells.values():
        if different := known ^ cell.key.keys():
            raise ConfigError(
                f"{path} was written by a program whose cells have other options (not in both: {', '.join(sorted(different))})"
                "; its cells cannot be distinguished from new ones, so use another file"
            )


def _sweep(options: Sequence[TrainOptions], log: SweepLog, measure: Measure, check: Check, keep: bool) -> None:
    """Measure the cells that ``log`` lacks. If this process ends early, ``log`` keeps the finished cells.

    Raises:
        ConfigError: a cell that is to be measured cannot be, by its options. No cell is measured then.
    """
    from tqdm import tqdm

    here = lasting(results.environment())
    measured = [each for each in options if _is_measured(log, each)]
    # A profile that is not there any more has not changed: what it gave stays.
    changed = [each for each in measured if profile_digest(each.model) not in (None, _environment(log, each).get("profile"))]
    foreign = [each for each in measured if each not in changed and lasting(_environment(log, each)) != here]
    if changed:
        print(f"{len(changed)} cells are of an earlier content of their profile, so they are measured again", file=sys.stderr)
    results.say_foreign(len(foreign), "cells", keep)
    todo = [each for each in options if each not in measured or each in changed or (each in foreign and not keep)]
    for each in todo:  # a mistake in the command is told now, and not after hours
        try:
            check(each)
        except ConfigError as error:
            raise ConfigError(f"{_name(each)}: {error}") from error
    done = len(options) - len(todo)
    # No smoothing: cells differ in length, so their mean is the best estimate of the remaining time.
    with tqdm(total=len(options), initial=done, unit="cell", smoothing=0, dynamic_ncols=True) as progress:
        try:
            for each in todo:
                progress.set_postfix_str(_name(each), refresh=True)
                cell = _measured(each, log, measure)
                progress.update()
                _say(cell, each, progress)
        except (KeyboardInterrupt, SystemExit):
            progress.write("interrupted: the finished cells are kept, and the same command goes on from them", file=sys.stderr)
            raise


def _is_measured(log: SweepLog, options: TrainOptions) -> bool:
    cell = log.cells.get(identity(key_of(options)))
    return cell is not None and cell.error is None


def _environment(log: SweepLog, options: TrainOptions) -> Mapping[str, Any]:
    return log.cells[identity(key_of(options))].environment


def _measured(options: TrainOptions, log: SweepLog, measure: Measure) -> Cell:
    """Measure a cell and add it to ``log``. An error becomes the cell's result, because other cells may succeed."""
    environment, key, began = results.environment(), key_of(options), time.monotonic()
    if (digest := profile_digest(options.model)) is not None:
        environment["profile"] = digest
    try:
        rows = measure(options)
        if not rows:
            raise ValueError("no rows were measured")
        json.dumps(rows, allow_nan=False)
    except Exception as error:
        cell = Cell(key, [], environment, time.monotonic() - began, f"{type(error).__name__}: {error}")
    else:
        cell = Cell(key, rows, environment, time.monotonic() - began)
    log.add(cell)
    return cell


def _say(cell: Cell, options: TrainOptions, progress: tqdm[Any]) -> None:
    if cell.error is not None:
        progress.write(f"FAILED {_name(options)}: {cell.error}", file=sys.stderr)
        return
    medians = (f"{row['system']} {1e3 * row['step_seconds']['median']:.1f} ms" for row in cell.rows)
    progress.write(f"{_name(options)}: {', '.join(medians)}", file=sys.stderr)


def _name(options: TrainOptions) -> str:
    """The name of a cell, which distinguishes it from other cells, in one line."""
    parts = [options.model, f"{options.workers}+{options.servers}", options.bandwidth or "loopback", f"rho {options.rho:g}"]
    sizes = ((name, getattr(options, name)) for name in ("partition", "credit"))
    return " ".join([*parts, *(f"{name} {value}" for name, value in sizes if value != "auto")])


def _write_json(path: Path, log_path: Path, cells: Sequence[Cell]) -> None:
    """Write the rows of all cells, with the environment of the cell that was measured last."""
    if len({identity(lasting(cell.environment)) for cell in cells}) > 1:
        print(f"the cells were measured in different environments: {log_path} has each, {path} the last one's", file=sys.stderr)
    latest = max(cells, key=lambda cell: str(cell.environment.get("time", "")))
    results.write(path, [row for cell in cells for row in cell.rows], latest.environment)


def _conclude(cells: Sequence[Cell], path: Path) -> int:
    from .harness.rows import disturbed, wrong

    failed = [cell for cell in cells if cell.error is not None]
    print(f"{len(cells) - len(failed)} of {len(cells)} cells are in {path}")
    for cell in failed:
        print(f"failed: {_differing(cell.key, cells)}: {cell.error}", file=sys.stderr)
    if failed:
        print("the same command tries them again", file=sys.stderr)
    of_cells = [(f"{_differing(cell.key, cells)}: ", list(map(dict, cell.rows))) for cell in cells]
    mistakes = [where + sentence for where, rows in of_cells for sentence in wrong(rows)]
    for sentence in [*(where + sentence for where, rows in of_cells for sentence in disturbed(rows)), *mistakes]:
        print(sentence, file=sys.stderr)
    return 1 if failed or mistakes else 0


def _differing(key: Mapping[str, Any], cells: Sequence[Cell]) -> str:
    """The options by which ``key`` differs from some other cell."""
    names = [name for name in SWEPT if any(other.key[name] != key[name] for other in cells)]
    return ", ".join(f"{name}={key[name]}" for name in names or ["model"])


def _values_of(name: str) -> Callable[[str], tuple[Any, ...]]:
    """Parse an option (``type=``): a list of values that ``bench train`` accepts for this option."""

    def parse(text: str) -> tuple[Any, ...]:
        # A comma separates the list, so a slash stands for the comma within one bandwidth.
        parts = [part.replace("/", ",") if name == "bandwidth" else part for part in text.split(",")]
        if not all(parts):
            raise argparse.ArgumentTypeError(f"{text!r} has an empty place between its commas")
        one = argparse.ArgumentParser(exit_on_error=False, add_help=False)
        train.add_arguments(one)
        try:
            return tuple(getattr(one.parse_args([f"--{name}={part}"]), name) for part in parts)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentTypeError(error.message) from error

    return parse
