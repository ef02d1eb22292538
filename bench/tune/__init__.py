"""``python -m bench tune``: searchers side by side on one cluster, against an exhaustive grid.

1. Measured: EMULATED models train with every configuration of a grid, in several passes.
2. Replayed: each searcher runs from several seeds over the measured windows; nothing is trained.
3. Live (``--live``): the tuner runs as in a user's job, in training jobs of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from commsched.core.errors import ConfigError
from commsched.settings import parse_rate
from commsched.tuner.search_run import LONGER_AT_MOST
from commsched.tuner.searchers import searcher_names

from ..harness.arguments import at_least, check_settings, positive, require_named, setting
from ..harness.extras import require_extra
from ..harness.results import SCHEMA, add_json_argument, write
from ..train import MIN_SETTLE_STEPS
from .case import Case
from .comparison import MODEL, Searching, replayed_rows
from .grid import Row, case_of, measure, read_again
from .table import live_text, summary_text, text

#: Limits of a job: seconds for starting and ending, and the factor by which its steps may exceed the expected time.
_START_SECONDS = 300.0
_PATIENCE = 6.0

#: Seconds of a job besides the steps of its grid: starting, and measuring links and layers.
_OVERHEAD_SECONDS = 20.0


@dataclass(frozen=True)
class TuneOptions:
    """The options of measurement and replay. Every combination of ``models``, ``workers`` and ``bandwidths`` is a case.

    Args:
        models: names from ``workloads.registry``, or profiles' ``.json`` files.
        workers: numbers of ranks; each rank has a process, a host and a shard of the parameter server.
        bandwidths: rates of every link, such as ``"500mbit"``.
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

    models: tuple[str, ...] = ("vgg16",)
    workers: tuple[int, ...] = (2,)
    bandwidths: tuple[str, ...] = ("500mbit",)
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
            for model, workers, bandwidth in product(self.models, self.workers, self.bandwidths)
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = TuneOptions()
    parser.add_argument("--model", dest="models", type=_list_of(str), default=default.models, metavar="NAME,...")
    parser.add_argument("--workers", type=_list_of(at_least(2)), default=default.workers, metavar="N,...", help="(default: 2)")
    parser.add_argument(
        "--bandwidth",
        dest="bandwidths",
        type=_list_of(setting(parse_rate)),
        default=default.bandwidths,
        metavar="RATE,...",
        help="of every link (default: 500mbit)",
    )
    parser.add_argument("--rho", type=positive, default=default.rho, help="communication over computation (default: 1)")
    parser.add_argument("--megabytes", type=positive, default=default.megabytes, metavar="M", help="of gradients (default: 16)")
    parser.add_argument("--transport", default=default.transport, help="that gradients travel by (default: ps)")
    parser.add_argument(
        "--grid",
        choices=("fine", "coarse"),
        default=default.grid,
        help="fine: whole octaves of partition and credit; coarse: every other (default: fine)",
    )
    parser.add_argument("--passes", type=at_least(2), default=default.passes, metavar="N", help="over the grid (default: 3)")
    parser.add_argument(
        "--steps", type=at_least(2), default=default.steps, metavar="N", help="counted in a window (default: 5)"
    )
    parser.add_argument(
        "--settle", type=at_least(MIN_SETTLE_STEPS), default=default.settle, metavar="N", help="before them (default: 3)"
    )
    parser.add_argument(
        "--seeds", type=at_least(1), default=default.seeds, metavar="N", help="replays of each searcher (default: 5)"
    )
    parser.add_argument(
        "--searchers",
        type=_searchers,
        default=default.searchers,
        metavar="NAME,...",
        help=f"{', '.join(searcher_names())}; bayes{MODEL}: with the simulator's predictions (default: all)",
    )
    parser.add_argument("--paper", action="store_true", help="also the published search: 15 points of 100 steps")
    parser.add_argument("--live", action="store_true", help="also the tuner itself: a job per searcher and seed")
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="the grids are those that an earlier --json has, nothing is measured"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="for regret.svg, the searches' curves")
    add_json_argument(parser)


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
        raise ConfigError("replay and live: what is replayed was measured before, and may be of another machine")
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
        _keep(args.json, rows)
        if options.live:
            from .live import live_rows

            live = live_rows(case_of(grid), grid, _live_searchers(options), options.seeds)
            print(live_text(live), flush=True)
            rows += live
            _keep(args.json, rows)
    replayed = [row for row in rows if row["kind"] == "replayed"]
    print(summary_text(replayed), flush=True)
    if args.out is not None:
        _draw(args.out, replayed)
    return 0


def _keep(path: Path | None, rows: Sequence[Row]) -> None:
    """Write the rows so far, so that they are kept if the rest fails."""
    if path is not None:
        write(path, rows)


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
            f"up to {LONGER_AT_MOST} times as long where steps vary much"
        )
    print(end="", flush=True)


def _live_searchers(options: TuneOptions) -> list[str]:
    """The searchers to run live, without ``+model``, because the tuner always has the model."""
    return list(dict.fromkeys(name.removesuffix(MODEL) for name in options.searchers))


def _expected_seconds(case: Case, options: TuneOptions) -> float:
    steps = len(case.grid) * options.passes * (options.settle + options.steps)
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
    from ..report.style import styled, to_svg
    from .regret_figure import regret_figure

    directory.mkdir(parents=True, exist_ok=True)
    with styled():
        (directory / "regret.svg").write_text(to_svg(regret_figure(rows), "regret"), encoding="utf-8")
    print(directory / "regret.svg")


# --- argument types ---


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def values(text: str) -> tuple[Any, ...]:
        found = tuple(parse(part) for part in text.split(","))
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{text!r} names one twice")
        return found

    return values


def _searchers(text: str) -> tuple[str, ...]:
    allowed = [*searcher_names(), f"bayes{MODEL}"]
    chosen: tuple[str, ...] = _list_of(str)(text)
    for name in chosen:
        if name not in allowed:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; there are: {', '.join(allowed)}")
    return chosen
