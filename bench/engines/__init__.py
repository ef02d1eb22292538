"""``python -m bench engines``: commsched under TensorFlow, MXNet or JAX, in turn with that engine's own data parallelism."""

from __future__ import annotations

import argparse

from commsched.settings import parse_bytes, parse_rate
from commsched.simulator.scenario import bytes_factor

from ..harness.arguments import at_least, positive, setting
from ..harness.results import add_json_argument
from .registry import NAMES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size = setting(parse_bytes)
    parser.add_argument(
        "--engine",
        choices=NAMES,
        required=True,
        help="what trains; run this where it is installed, as with .venv-jax/bin/python",
    )
    parser.add_argument("--model", default="uniform", help="a name, or a profile's .json file (default: uniform)")
    parser.add_argument("--workers", type=at_least(2), default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument("--bandwidth", type=setting(parse_rate), required=True, metavar="RATE", help="of each link, as 500mbit")
    parser.add_argument("--rho", type=positive, default=1.0, help="communication over computation (default: 1)")
    parser.add_argument("--megabytes", type=positive, metavar="M", help="of gradients (default: uniform 72, others 48)")
    parser.add_argument("--systems", metavar="S,...", help="commsched, and the engine's own (default: all)")
    parser.add_argument("--rounds", type=at_least(1), default=3, metavar="N", help="turns of each (default: 3)")
    parser.add_argument("--steps", type=at_least(1), default=8, metavar="N", help="counted in a turn (default: 8)")
    parser.add_argument("--settle", type=at_least(3), default=4, metavar="N", help="before them (default: 4)")
    for name in ("partition", "credit"):
        parser.add_argument(
            f"--{name}", type=lambda text: text if text == "auto" else size(text), default="auto", metavar="SIZE",
            help="of commsched (default: auto)",
        )  # fmt: skip
    parser.add_argument("--timeout", type=positive, default=600.0, metavar="SECONDS", help="for each turn (default: 600)")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    from ..harness.links import Links
    from ..harness.output import end
    from ..harness.scaling import scale
    from ..workloads.registry import load_profile
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
