"""``python -m bench tune``: searchers side by side on one cluster, against an exhaustive grid.

1. Measured: EMULATED models train with every configuration of a grid, and with the sizes that the job itself chooses, in
   several passes.
2. Replayed: each searcher runs from several seeds over the measured windows; nothing is trained.
3. Live (``--live``): the tuner runs as in a user's job, in training jobs of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from commsched import ConfigError
from commsched.tuner.search_run import LONGER_AT_MOST
from commsched.tuner.searchers import SEARCHERS

from ..harness.arguments import (
    add_options,
    at_least,
    check_settings,
    list_of,
    new_directory,
    require_extra,
    require_named,
)
from ..harness.results import SCHEMA, write
from ..turns import MIN_SETTLE_STEPS
from .case import Case
from .comparison import MODEL, Searching, replayed_rows
from .grid import Row, case_of, measure, read_again
from .table import chosen_text, live_text, summary_text, text

#: Limits of a job: seconds for starting and ending, and the factor by which its steps may exceed the expected time.
_START_SECONDS = 300.0
_PATIENCE = 6.0

#: Seconds of a job besides its steps: starting, and measuring links and layers.
_OVERHEAD_SECONDS = 20.0

#: Steps of a job until it has chosen its sizes.
_CHOOSING_STEPS = 100


@dataclass(frozen=True)
class TuneOptions:
    """The options of measurement and replay. Every combination of ``model``, ``workers`` and ``bandwidth`` is a case.

    Args:
        model: names from ``bench.workloads``, or profiles' ``.json`` files.
        workers: numbers of ranks; each rank has a process, a host and a shard of the parameter server.
        bandwidth: rates of every link, such as ``"500mbit"``.
        rho: communication time over computation time at the nominal bandwidth.
        megabytes: size of the gradients after scaling.
        transport: transport of the gradients.
        grid: ``"fine"`` means whole octaves of partition and credit, ``"coarse"`` every other octave.
        passes: number of passes over the grid, each in another order, with one window of ``steps`` per configuration. At least
            two, because their differences show how much windows differ.
        settle: steps at the beginning of a window that do not count.
        seeds: number of replays of each searcher.
        searchers: names of searchers; ``bayes+model`` gets seeds and predictions of the simulator.
        paper: also run the search that ByteScheduler's authors published.
        live: also run the tuner itself, in ``seeds`` jobs for each searcher.
    """

    model: tuple[str, ...] = ("vgg16",)
    workers: tuple[int, ...] = (2,)
    bandwidth: tuple[str, ...] = ("500mbit",)
    rho: float = 1.0
    megabytes: float = 16.0
    transport: str = "ps"
    grid: str = "fine"
    passes: int = 3
    settle: int = MIN_SETTLE_STEPS
    steps: int = 5
    seeds: int = 5
    searchers: tuple[str, ...] = (f"bayes{MODEL}", "bayes", "random", "grid", "sgd")
    paper: bool = False
    live: bool = False

    def cases(self) -> list[Case]:
        return [
            Case(model, workers, bandwidth, self.rho, self.megabytes, self.transport, self.grid == "coarse")
            for model, workers, bandwidth in product(self.model, self.workers, self.bandwidth)
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = TuneOptions()
    names = ("model", "workers", "bandwidth", "rho", "megabytes", "transport", "settle")
    add_options(parser, **{name: getattr(default, name) for name in names}, json=None)
    parser.add_argument(
        "--grid",
        choices=("fine", "coarse"),
        default=default.grid,
        help="fine: whole octaves of partition and credit; coarse: every other (default: fine)",
    )
    for name, least, what in (
        ("passes", 2, "passes over the grid"),
        ("steps", 2, "steps of a window that count"),
        ("seeds", 1, "replays of each searcher"),
    ):
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=at_least(least), default=value, metavar="N", help=f"{what} (default: {value})")
    searchers_help = f"{', '.join(SEARCHERS)}; bayes{MODEL}: with the simulator's predictions (default: all)"
    parser.add_argument("--searchers", type=_searchers, default=default.searchers, metavar="NAME,...", help=searchers_help)
    parser.add_argument("--paper", action="store_true", help="also the published search: 15 points of 100 steps")
    parser.add_argument("--live", action="store_true", help="also the tuner itself: a job for each searcher and seed")
    replay_help = "take the grids from FILE, which an earlier --json wrote, and measure nothing"
    parser.add_argument("--replay", type=Path, metavar="FILE", help=replay_help)
    parser.add_argument("--out", type=new_directory, metavar="DIR", help="directory for regret.svg, the curves of the searches")


def options_of(args: argparse.Namespace) -> TuneOptions:
    """The options of a command line."""
    return TuneOptions(**{each.name: getattr(args, each.name) for each in fields(TuneOptions)})


def run(args: argparse.Namespace) -> int:
    options = options_of(args)
    if args.out is not None:
        require_extra("report", "matplotlib")
    if options.paper or any(name.startswith("bayes") for name in options.searchers):
        require_extra("tune", "skopt")
    if args.replay is not None and options.live:
        raise ConfigError("replay and live: a replayed grid was measured before, possibly on another machine")
    require_named(options.transport)
    check_settings({"transport": options.transport})
    sources: Sequence[Case | Row] = options.cases() if args.replay is None else _read(args.replay)
    if args.replay is None:
        _announce(options.cases(), options)
    rows: list[Row] = []
    for source in sources:
        grid = _measure(source, options) if isinstance(source, Case) else source
        found = replayed_rows(grid, Searching(options.searchers, options.seeds, options.paper))
        print(text(grid, found), flush=True)
        rows += [grid, *found]
        write(args.json, rows)  # so far, so that they are kept if the rest fails
        if options.live:
            from .live import live_rows

            live = live_rows(case_of(grid), grid, _live_searchers(options), options.seeds)
            print(live_text(live), flush=True)
            rows += live
            write(args.json, rows)
    replayed = [row for row in rows if row["kind"] == "replayed"]
    print(summary_text(replayed), flush=True)
    if chosen := chosen_text([row for row in rows if row["kind"] == "grid"]):
        print(chosen, flush=True)
    if args.out is not None:
        _draw(args.out, replayed)
    return 0


def _announce(cases: Sequence[Case], options: TuneOptions) -> None:
    for case in cases:
        print(
            f"{case}: {len(case.grid)} configurations, {options.passes} passes, {options.settle} + {options.steps} steps of "
            f"about {case.expected_step_seconds():.2f} s: about {_expected_seconds(case, options) / 60:.0f} min"
        )
    if len(cases) > 1:
        print(f"all: about {sum(_expected_seconds(case, options) for case in cases) / 60:.0f} min")
    if options.live:
        from .live import STEADY_STEPS

        jobs = len(_live_searchers(options)) * options.seeds
        seconds = sum(jobs * (_OVERHEAD_SECONDS + STEADY_STEPS * case.expected_step_seconds()) for case in cases)
        print(
            f"live: {jobs} jobs in each case, about {seconds / 60:.0f} min more; "
            f"up to {LONGER_AT_MOST} times as long if steps vary much"
        )
    print(end="", flush=True)


def _live_searchers(options: TuneOptions) -> list[str]:
    """The searchers to run live, without ``+model``, because the tuner always has the model."""
    return list(dict.fromkeys(name.removesuffix(MODEL) for name in options.searchers))


def _expected_seconds(case: Case, options: TuneOptions) -> float:
    steps = _CHOOSING_STEPS + (len(case.grid) + 1) * options.passes * (options.settle + options.steps)
    return _OVERHEAD_SECONDS + steps * case.expected_step_seconds()


def _timeout(case: Case, options: TuneOptions) -> float:
    return _START_SECONDS + _PATIENCE * _expected_seconds(case, options)


def _measure(case: Case, options: TuneOptions) -> Row:
    print(f"{case}:", flush=True)
    return measure(
        case, passes=options.passes, settle=options.settle, steps=options.steps, timeout_seconds=_timeout(case, options)
    )


def _read(path: Path) -> list[Row]:
    """The grids in a file that this command wrote."""
    try:
        document = json.loads(path.read_text())
        if document["schema"] != SCHEMA:
            raise ConfigError(f"its schema is {document['schema']}, not {SCHEMA}")
        grids = [dict(row) for row in document["rows"] if row.get("kind") == "grid"]
        if not grids:
            raise ConfigError("there is no grid in it")
        return [read_again(row) for row in grids]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise ConfigError(f"replay={path}: {error}") from error


def _draw(directory: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    from ..harness.figures import styled, to_svg
    from .regret_figure import regret_figure

    directory.mkdir(parents=True, exist_ok=True)
    with styled():
        (directory / "regret.svg").write_text(to_svg(regret_figure(rows), "regret"), encoding="utf-8")
    print(directory / "regret.svg")


# --- argument types ---


def _searchers(text: str) -> tuple[str, ...]:
    allowed = [*SEARCHERS, f"bayes{MODEL}"]
    chosen: tuple[str, ...] = list_of(str)(text)
    for name in chosen:
        if name not in allowed:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; there are: {', '.join(allowed)}")
    return chosen
