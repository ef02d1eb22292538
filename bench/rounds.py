"""Many back-to-back rounds of one small tensor with one slow rank. Each result is checked.

A server that reuses memory too early gives the slow rank the numbers of the next round, because the fast ranks push them as
soon as they have the current round's. The tensor has several partitions, so that some partitions of a round are still being
read when others are done.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from commsched.core.errors import ConfigError
from commsched.settings import parse_bytes, parse_seconds

from .collectives import average, register
from .harness.arguments import add_transport_arguments, at_least, float32_bytes, setting, transport_settings
from .harness.job import Job, run_job
from .harness.results import add_json_argument, table, write
from .harness.route import Route

if TYPE_CHECKING:
    from commsched.session.session import Session

#: Numbers of elements and of rounds after which numbers repeat, so that averages are exact in float32. For 16 bits see
#: ``Route.short_periods``.
_PERIODS = (1021, 4093)

_COLUMNS = {
    "workers": "workers",
    "servers": "servers",
    "rounds": "rounds",
    "microseconds_per_round": "us/round",
    "wrong_rounds": "wrong",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=at_least(1), default=100_000, metavar="N", help="how many (default: 100000)")
    add_transport_arguments(parser)
    parser.add_argument("--slow-rank", type=at_least(0), default=1, metavar="R", help="the rank that dawdles (default: 1)")
    parser.add_argument("--size", type=float32_bytes, default="64KB", help="of the tensor (default: 64KB)")
    parser.add_argument(
        "--partition", type=setting(parse_bytes), default="16KB", metavar="SIZE", help="largest one (default: 16KB)"
    )
    parser.add_argument(
        "--timeout", type=setting(parse_seconds), default="3600", metavar="SECONDS", help="for all (default: 3600)"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    if args.slow_rank >= args.workers:
        raise ConfigError(f"slow-rank={args.slow_rank}, but the ranks are 0 to {args.workers - 1}")
    settings = {**transport_settings(args), "partition": args.partition}
    job = Job(args.workers, args.servers, None, settings, parse_seconds(args.timeout))
    periods = _PERIODS if args.wire == "none" else Route.of(args).short_periods()
    arguments = {"rounds": args.rounds, "size": args.size, "slow_rank": args.slow_rank, "periods": periods}
    outcome = run_job(job, __name__, arguments)
    row = {
        "transport": args.transport,
        "lane": args.lane if args.transport == "ps" else None,
        **{name: getattr(args, name) for name in ("order", "policy", "collective", "wire", "hierarchy")},
        "workers": args.workers,
        "servers": args.servers,
        "slow_rank": args.slow_rank,
        "size_bytes": args.size,
        "partition": args.partition,
        "rounds": args.rounds,
        "microseconds_per_round": 1e6 * max(rank["seconds"] for rank in outcome.by_rank) / args.rounds,
        "wrong_rounds": sum(rank["wrong_rounds"] for rank in outcome.by_rank),
    }
    print(table([row], _COLUMNS))
    if args.json:
        write(args.json, [row])
    return 1 if row["wrong_rounds"] else 0


# --- in each rank's process ---


def rank_main(session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The number of rounds in which this rank saw a wrong number, and the seconds of all rounds together."""
    buffer, group = register(session, "round", arguments["size"])
    elements, rounds = arguments["periods"]
    pattern = (np.arange(buffer.size) % elements).astype(np.float32)
    slow = session.rank == arguments["slow_rank"]
    delays = random.Random(session.rank)
    wrong = 0
    began = time.monotonic()
    for number in range(arguments["rounds"]):
        np.add(pattern, number % rounds + session.rank, out=buffer)
        if slow and delays.random() < 0.1:
            time.sleep(delays.uniform(0, 2e-3))
        average(group)
        if slow and delays.random() < 0.1:
            time.sleep(delays.uniform(0, 2e-3))
        wrong += bool(np.any(buffer != pattern + (number % rounds + (session.world_size - 1) / 2)))
    return {"wrong_rounds": wrong, "seconds": time.monotonic() - began}
