"""Many back-to-back rounds of one small tensor with one slow rank, each result checked.

A server that reuses memory too early hands the slow rank the next round's numbers: the fast ranks push them as soon as
they have this round's. The tensor has several partitions, so that some of a round are still read when others are done.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from commsched.core.config import parse_bytes, parse_seconds
from commsched.core.errors import ConfigError

from .arguments import at_least, float32_bytes, setting
from .collectives import average, check_settings, register
from .job import Job, run_job
from .results import add_json_argument, table, write

if TYPE_CHECKING:
    from commsched.session import Session

_COLUMNS = {
    "workers": "workers",
    "servers": "servers",
    "rounds": "rounds",
    "microseconds_per_round": "us/round",
    "wrong_rounds": "wrong",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=at_least(1), default=100_000, metavar="N", help="how many (default: 100000)")
    parser.add_argument("--transport", default="ps", help="the way gradients travel (default: ps)")
    parser.add_argument("--lane", default="tcp", help="of the parameter server: tcp, grpc (default: tcp)")
    parser.add_argument("--workers", type=at_least(2), default=2, metavar="N", help="ranks, a process each (default: 2)")
    parser.add_argument(
        "--servers", type=at_least(0), default=0, metavar="K", help="separate servers; 0: a shard on every rank"
    )
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
    settings = {"transport": args.transport, "lane": args.lane, "partition": args.partition}
    check_settings(settings)
    job = Job(args.workers, args.servers, None, settings, parse_seconds(args.timeout))
    outcome = run_job(job, __name__, {"rounds": args.rounds, "size": args.size, "slow_rank": args.slow_rank})
    row = {
        "transport": args.transport,
        "lane": args.lane if args.transport == "ps" else None,
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
    """How many rounds this rank saw a wrong number in, and the seconds that all took."""
    buffer, group = register(session, "round", arguments["size"])
    pattern = (np.arange(buffer.size) % 1021).astype(np.float32)
    slow = session.rank == arguments["slow_rank"]
    delays = random.Random(session.rank)
    wrong = 0
    began = time.monotonic()
    for number in range(arguments["rounds"]):
        np.add(pattern, number % 4093 + session.rank, out=buffer)
        if slow and delays.random() < 0.1:
            time.sleep(delays.uniform(0, 2e-3))
        average(group)
        if slow and delays.random() < 0.1:
            time.sleep(delays.uniform(0, 2e-3))
        wrong += bool(np.any(buffer != pattern + (number % 4093 + (session.world_size - 1) / 2)))
    return {"wrong_rounds": wrong, "seconds": time.monotonic() - began}
