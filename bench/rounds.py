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
from typing import Any

import numpy as np

from commsched import ConfigError, Session
from commsched.settings import parse_seconds

from .harness.arguments import TRANSPORT_OPTIONS, add_options, at_least, transport_columns, transport_settings
from .harness.averaging import average, register
from .harness.job import Job, run_job
from .harness.network_load import Route
from .harness.results import table, write

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
    add_options(parser, **TRANSPORT_OPTIONS, size="64KB", partition="16KB", timeout="3600", json=None)
    parser.add_argument("--rounds", type=at_least(1), default=100_000, metavar="N", help="number of rounds (default: 100000)")
    parser.add_argument(
        "--slow-rank", type=at_least(0), default=1, metavar="R", help="the rank that sleeps at times (default: 1)"
    )


def run(args: argparse.Namespace) -> int:
    if args.slow_rank >= args.workers:
        raise ConfigError(f"slow-rank={args.slow_rank}, but the ranks are 0 to {args.workers - 1}")
    settings = {**transport_settings(args), "partition": args.partition}
    job = Job(args.workers, args.servers, None, settings, parse_seconds(args.timeout))
    periods = _PERIODS if args.wire == "none" else Route.of(args).short_periods()
    arguments = {"rounds": args.rounds, "size": args.size, "slow_rank": args.slow_rank, "periods": periods}
    outcome = run_job(job, __name__, arguments)
    row = {
        **transport_columns(args),
        "slow_rank": args.slow_rank,
        "size_bytes": args.size,
        "partition": args.partition,
        "rounds": args.rounds,
        "microseconds_per_round": 1e6 * max(rank["seconds"] for rank in outcome.by_rank) / args.rounds,
        "wrong_rounds": sum(rank["wrong_rounds"] for rank in outcome.by_rank),
    }
    print(table([row], _COLUMNS))
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
