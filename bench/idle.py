"""The cost of an idle session: CPU time of each rank without traffic, and while all ranks wait for one that is late.

Training computes for most of a step and then waits for the network. A transport that polls would take a core from it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

from commsched import Session
from commsched.settings import parse_seconds

from .harness.arguments import TRANSPORT_OPTIONS, add_options, setting, transport_columns, transport_settings, transport_words
from .harness.averaging import average, register
from .harness.job import Job, run_job
from .harness.measure import cpu_seconds
from .harness.results import Row, table, write

#: Long enough for late starts to finish, and for threads to go to sleep.
_SETTLE_SECONDS = 0.5
_WARM_UP_STEPS = 20

_COLUMNS = {
    "transport": "transport",
    "order": "order",
    "rank": "rank",
    "idle_share": "idle (% of a core)",
    "waiting_share": "waiting (%)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, **TRANSPORT_OPTIONS, size="4MB", timeout="120", json=None)
    parser.add_argument(
        "--seconds", type=setting(parse_seconds), default="3", metavar="S", help="time in each state (default: 3)"
    )
    parser.add_argument(
        "--most", type=_percent, metavar="P", help="fail if a rank takes more than P %% of a core in either state"
    )


def run(args: argparse.Namespace) -> int:
    settings = transport_settings(args)
    job = Job(args.workers, args.servers, None, settings, parse_seconds(args.timeout))
    outcome = run_job(job, __name__, {"size": args.size, "seconds": parse_seconds(args.seconds)})
    rows = [
        {
            **transport_columns(args),
            "rank": rank,
            "seconds": parse_seconds(args.seconds),
            **shares,
        }
        for rank, shares in enumerate(outcome.by_rank)
    ]
    print(f"{transport_words(args)}: {args.workers} workers; all others wait for the last rank")
    print(table([_shown(row) for row in rows], _COLUMNS))
    write(args.json, rows)
    busy = max(max(row["idle_share"], row["waiting_share"]) for row in rows)
    if args.most is not None and busy > args.most / 100:
        print(f"{busy:.1%} of a core is more than {args.most:g} %", file=sys.stderr)
        return 1
    return 0


def _shown(row: Row) -> Row:
    return {**row, "idle_share": 100 * row["idle_share"], "waiting_share": 100 * row["waiting_share"]}


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")
    return value


# --- in each rank's process ---


def rank_main(session: Session, arguments: Mapping[str, Any]) -> dict[str, float]:
    """Shares of a core that this rank used: ``idle_share`` with nothing to do, and ``waiting_share`` while the last rank was
    late with a tensor that all other ranks had submitted."""
    _, group = register(session, "awaited", arguments["size"])
    for _ in range(_WARM_UP_STEPS):
        average(group)
    session.gather("settle")
    time.sleep(_SETTLE_SECONDS)
    idle = _share(arguments["seconds"])
    session.gather("wait")
    late = session.rank == session.world_size - 1
    group.begin_step()
    if not late:
        group.notify_ready(0)
    time.sleep(_SETTLE_SECONDS)
    waiting = _share(arguments["seconds"])
    if late:
        group.notify_ready(0)
    group.proxies[0].wait()
    return {"idle_share": idle, "waiting_share": waiting}


def _share(seconds: float) -> float:
    """The share of a core that this process uses while this thread sleeps for ``seconds``."""
    cpu, began = cpu_seconds(), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds() - cpu) / (time.monotonic() - began)
