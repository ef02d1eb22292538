"""``python -m bench engines``: commsched under TensorFlow, MXNet or JAX, in turn with that engine's own data parallelism."""

from __future__ import annotations

import argparse

from commsched.settings import parse_rate
from commsched.simulator.scenario import bytes_factor

from ..harness.arguments import add_options, positive, setting
from .turn import ENGINES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine_help = "the engine that trains; use the environment that has it, as with .venv-jax/bin/python"
    parser.add_argument("--engine", choices=ENGINES, required=True, help=engine_help)
    add_options(parser, model="uniform", workers=2, rho=1.0, megabytes=None, rounds=3, steps=8, settle=4)
    add_options(parser, partition="auto", credit="auto", json=None)
    rate_help = "rate of each link, such as 500mbit"
    parser.add_argument("--bandwidth", type=setting(parse_rate), required=True, metavar="RATE", help=rate_help)
    parser.add_argument("--systems", metavar="S,...", help="commsched, and systems of the engine (default: all)")
    timeout_help = "time limit of each turn (default: 600)"
    parser.add_argument("--timeout", type=positive, default=600.0, metavar="SECONDS", help=timeout_help)


def run(args: argparse.Namespace) -> int:
    from ..harness.links import Links
    from ..harness.row_table import end
    from ..harness.scaling import scale
    from ..workloads import load_profile
    from .compare import Comparison, measure_rows, text

    links = Links.of(args.workers, 0, args.bandwidth)
    assert links.rates is not None
    scaling = scale(load_profile(args.model), args.megabytes, args.rho, min(links.rates), bytes_factor(args.workers))
    rows = measure_rows(
        Comparison(
            engine=args.engine,
            systems=tuple(args.systems.split(",")) if args.systems else (),
            scaling=scaling,
            links=links,
            rounds=args.rounds,
            settle=args.settle,
            steps=args.steps,
            partition=args.partition,
            credit=args.credit,
            timeout_seconds=args.timeout,
        )
    )
    return end(rows, text(rows), args.json)
