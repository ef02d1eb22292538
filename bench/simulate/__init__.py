"""``python -m bench simulate``: the step of each system in virtual time, for clusters that are not available.

The inputs are layers, bytes and overheads. The library's own Scheduler determines the order of its own partitions. With
``--check`` the inputs are measurements of ``bench train``, and the command reports the simulator's errors.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from commsched import ConfigError
from commsched.settings import parse_bytes, parse_rate
from commsched.simulator.profile import Profile
from commsched.simulator.scenario import bytes_factor

from ..harness.arguments import add_options, at_least, list_of, or_auto, positive, setting
from ..harness.results import SCHEMA, table, write
from ..harness.rows import compare_with_ddp
from ..harness.simulated import NotSimulated
from ..systems import SYSTEMS
from ..workloads import load_profile, model_names
from .check import errors, simulated_seconds, typical_error
from .row import Case, make_row

_DEFAULT_SYSTEMS = "ddp,ddp-tuned,fifo,commsched,commsched-all-reduce"

#: Rows of clusters of more workers have no timeline, because each timeline is long and there are many rows.
_MAX_DRAWN_WORKERS = 16

_COLUMNS = {
    "model": "model",
    "workers": "workers",
    "servers": "servers",
    "gigabits": "Gbit/s",
    "rho": "rho",
    "system": "system",
    "milliseconds": "ms/step",
    "bound": "T* (ms)",
    "efficiency": "T*/T",
    "speedup_vs_ddp": "vs ddp",
    "possible_speedup_vs_ddp": "possible",
    "config": "with",
}

_CHECK_COLUMNS = {
    "model": "model",
    "workers": "workers",
    "servers": "servers",
    "rho": "rho",
    "system": "system",
    "measured": "measured (ms)",
    "simulated": "simulated (ms)",
    "error": "error",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, model=model_names(), bandwidth=("10gbit", "25gbit", "100gbit", "400gbit"), json=None)
    workers_help = "numbers of ranks (default: 8,64,512,4096)"
    parser.add_argument("--workers", type=list_of(at_least(1)), default="8,64,512,4096", metavar="N,...", help=workers_help)
    servers_help = "numbers of separate servers, or n: as many as workers; 0: a shard on every rank (default: 0)"
    parser.add_argument("--servers", type=list_of(_servers), default="0", metavar="K,...", help=servers_help)
    systems_help = f"{', '.join(SYSTEMS)} (default: {_DEFAULT_SYSTEMS})"
    parser.add_argument("--systems", type=list_of(_system), default=_DEFAULT_SYSTEMS, metavar="NAME,...", help=systems_help)
    for name in ("partition", "credit"):
        size = or_auto(setting(parse_bytes))
        parser.add_argument(f"--{name}", type=size, default="auto", metavar="SIZE", help="auto: the best one (default: auto)")
    for name, least, value, unit, text in (
        ("overhead", 0, "50e-6", "SECONDS", "cost of a partition or an all-reduce, besides its bytes"),
        ("latency", 0, "10e-6", "SECONDS", "latency of a message"),
        ("straggler", 1, "1", "FACTOR", "factor by which one worker computes more slowly"),
    ):
        parser.add_argument(
            f"--{name}", type=_number_from(least), default=value, metavar=unit, help=f"{text} (default: {value})"
        )
    rho_help = "instead of --bandwidth: rates at which communication takes X times as long as computation"
    parser.add_argument("--rho", type=list_of(positive), metavar="X,...", help=rho_help)
    copies_help = "gradients are copied from devices, and averages back, at this rate each way (96gbit is 12 GB/s)"
    parser.add_argument("--copy-rate", type=setting(parse_rate), metavar="RATE", help=copies_help)
    clip_help = "every loop clips by a norm; commsched waits for the norm only, all others wait for all averages"
    parser.add_argument("--clip", action="store_const", const="norm", help=clip_help)
    parser.add_argument("--check", type=Path, metavar="FILE", help="simulate what bench train measured into FILE, and compare")


def run(args: argparse.Namespace) -> int:
    return _check(args.check, args.json) if args.check else _predict(args)


def _predict(args: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    print(
        f"SIMULATED, not measured. Each partition or all-reduce costs {args.overhead} s besides its bytes,\n"
        f"messages arrive {args.latency} s after their last byte has left, and NICs are full duplex and shared fairly.\n"
        "Hosts are assumed to keep up with their links.\n"
        "Equal workers act in lock step: with a shard on each, steps were 1 % shorter to 12 % longer than in full detail.",
        flush=True,
    )
    if args.copy_rate:
        print(f"Every system copies gradients to the host and averages back, at {args.copy_rate} each way.", flush=True)
    if args.clip:
        print(
            "Every loop clips by a norm: commsched waits for the norm in the next forward, the others for all averages.\n"
            "T* is the bound of such loops.",
            flush=True,
        )
    for case in _cases(args):
        cell = compare_with_ddp(_cell(case, args))
        rows += cell
        print(table([_shown(row) for row in cell], _COLUMNS), flush=True)
    write(args.json, [row if row["workers"] <= _MAX_DRAWN_WORKERS else {**row, "timeline": []} for row in rows])
    return 0


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    for model in args.model:
        profile = load_profile(model)
        for workers in args.workers:
            for servers in (workers if each == "n" else int(each) for each in args.servers):
                for rate in _rates(args, profile, bytes_factor(workers, servers)):
                    yield Case(
                        profile,
                        workers,
                        servers,
                        rate,
                        partition_seconds=args.overhead,
                        latency_seconds=args.latency,
                        straggler=args.straggler,
                        copy_rate=None if args.copy_rate is None else parse_rate(args.copy_rate),
                    )


def _rates(args: argparse.Namespace, profile: Profile, factor: float) -> list[float]:
    if args.rho is None:
        return [parse_rate(bandwidth) for bandwidth in args.bandwidth]
    if not factor or not profile.compute_seconds:
        raise ConfigError(
            f"rho: {profile.model} has no computation, or nothing to send, so no rate gives it a rho; set bandwidth"
        )
    return [factor * profile.nbytes / (rho * profile.compute_seconds) for rho in args.rho]


def _cell(case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    partition, credit = (None if size == "auto" else parse_bytes(size) for size in (args.partition, args.credit))
    shards = case.servers or case.workers
    simulations = [(name, SYSTEMS[name].simulated) for name in args.systems]
    if args.clip:
        simulations = [(name, simulated.clipped()) for name, simulated in simulations]
    return [
        make_row(case, name, simulated.best(case.profile.nbytes, shards, partition, credit, case.seconds), args.clip)
        for name, simulated in simulations
    ]


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "gigabits": row["bandwidth_bps"] / 1e9,
        "milliseconds": 1e3 * row["step_seconds"]["median"],
        "bound": 1e3 * row["bound_seconds"],
    }


def _check(path: Path, out: Path | None) -> int:
    document = _read(path)
    shown = []
    for row in document["rows"]:
        try:
            row["simulated_seconds"] = simulated_seconds(row)
        except NotSimulated as error:
            row["simulated_seconds"] = None
            print(f"not simulated: {row['system']}, {row['workers']} workers: {error}", file=sys.stderr)
            continue
        shown.append(
            {
                **row,
                "measured": 1e3 * row["step_seconds"]["median"],
                "simulated": 1e3 * row["simulated_seconds"],
                "error": f"{errors([row])[0]:+.1%}",
            }
        )
    print(table(shown, _CHECK_COLUMNS))
    typical = typical_error(document["rows"])
    if typical is None:
        print(f"no row of {path} could be simulated", file=sys.stderr)
        return 1
    print(f"median absolute error of {len(shown)} rows: {typical:.1%}")
    write(out, document["rows"], document["environment"])
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        if document["schema"] != SCHEMA:
            raise ValueError(f"its schema is {document['schema']}, not {SCHEMA}")
        if not all("layers" in row and "step_seconds" in row for row in document["rows"]):
            raise ValueError("its rows are not those of bench train")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"check={path}: {type(error).__name__}: {error}") from error
    return dict(document)


def _servers(text: str) -> str:
    return text if text == "n" else str(at_least(0)(text))


def _system(text: str) -> str:
    if text not in SYSTEMS:
        raise argparse.ArgumentTypeError(f"{text!r} is no system; there are: {', '.join(SYSTEMS)}")
    return text


def _number_from(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return number

    return parse
