"""Averages one tensor of each of several sizes, in one process per rank. Reports time, bandwidth, CPU cost and correctness.

Time: from a common start until the last rank has the average; the median over repetitions. Bandwidth: ``algbw`` is the tensor's
bytes divided by that time. ``busbw`` is ``algbw`` times the bytes that the busiest NIC carries in each direction per byte of
tensor, so that it can be compared with the link; gradients in 16 bits have half as many bytes. CPU cost: CPU time of all
processes, ranks and servers, divided by the bytes of gradient that must cross the network, each counted once. A rank's own
shard does not cross the network. A byte of gradient is a byte of float32 and counts once for each host, however it travels.
Configurations that save bytes can therefore be compared with configurations that do not.

A shaped link lets a burst through before its rate applies. The share of the link is therefore reported only for many bursts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from commsched import ConfigError, Session
from commsched.core.group import TensorGroup
from commsched.settings import parse_seconds

from .harness.arguments import (
    FLOAT32_BYTES,
    TRANSPORT_OPTIONS,
    add_options,
    at_least,
    float32_sizes,
    transport_columns,
    transport_settings,
    transport_words,
)
from .harness.averaging import average, register
from .harness.job import Job, run_job
from .harness.measure import cpu_seconds
from .harness.network_load import Route, link_share
from .harness.results import Row, table, write

#: Numbers repeat after this many elements. They are small whole numbers, so that sums and averages are exact in float32. For 16
#: bits see ``Route.short_periods``.
_PERIOD = 8191

_COLUMNS = {
    "size_bytes": "size (B)",
    "milliseconds": "time (ms)",
    "milliseconds_min": "min",
    "milliseconds_max": "max",
    "algbw_megabytes_per_second": "algbw (MB/s)",
    "busbw_megabytes_per_second": "busbw (MB/s)",
    "link_share": "of link",
    "cpu_seconds_per_gigabyte": "CPU s/GB of gradient",
    "wrong_elements": "#wrong",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser, **TRANSPORT_OPTIONS, bandwidth=None, partition="4MB", credit="16MB", repetitions=9, timeout="600", json=None
    )
    parser.add_argument(
        "--ranks-per-host",
        type=at_least(1),
        default=1,
        metavar="R",
        help="with a bandwidth: ranks that share a link (default: 1)",
    )
    add_options(parser, **{"flow-bandwidth": None})
    sizes_help = "FROM:TO, FROM:TO:FACTOR or SIZE,SIZE,... (default: 64KB:64MB, by factors of 4)"
    parser.add_argument("--sizes", type=float32_sizes, default="64KB:64MB", help=sizes_help)
    parser.add_argument("--warmup", type=at_least(0), default=2, metavar="N", help="untimed averages of each size (default: 2)")


def run(args: argparse.Namespace) -> int:
    settings = {**transport_settings(args), "partition": args.partition, "credit": args.credit}
    job = Job(args.workers, args.servers, args.bandwidth, settings, parse_seconds(args.timeout), args.ranks_per_host)
    job = replace(job, flow_bandwidth=args.flow_bandwidth)
    if args.workers % args.ranks_per_host or (
        args.ranks_per_host > 1 and (args.bandwidth is None or args.workers == args.ranks_per_host)
    ):
        raise ConfigError(
            f"ranks-per-host={args.ranks_per_host}: it must divide workers={args.workers} and leave several "
            "hosts, and their links must have a bandwidth"
        )
    route = Route.of(args, args.ranks_per_host)
    period = _PERIOD if args.wire == "none" else route.short_periods()[0]
    arguments = {"sizes": args.sizes, "repetitions": args.repetitions, "warmup": args.warmup, "period": period}
    outcome = run_job(job, __name__, arguments)
    rows = [_row(args, route, outcome.link, [rank[index] for rank in outcome.by_rank]) for index in range(len(args.sizes))]
    print(_heading(args, route, outcome.link))
    print(table(rows, _COLUMNS))
    write(args.json, rows)
    return 1 if any(row["wrong_elements"] for row in rows) else 0


def _heading(args: argparse.Namespace, route: Route, link: str) -> str:
    where = (
        f"{args.servers} separate servers"
        if args.servers
        else "a shard on every rank"
        if args.transport == "ps"
        else "no servers"
    )
    per_host = f", {args.ranks_per_host} on each host" if args.ranks_per_host > 1 else ""
    return (
        f"{transport_words(args)}: {args.workers} workers{per_host}, {where}, link {link}, partition {args.partition}, "
        f"credit {args.credit}\n"
        f"busbw = algbw x {route.nic_factor:.4g}, the bytes that the busiest NIC carries in each direction per byte of tensor\n"
        "CPU s: of all processes together, per GB of float32 gradient that hosts have to exchange, in any wire dtype"
    )


def _row(args: argparse.Namespace, route: Route, link: str, by_rank: Sequence[Mapping[str, Any]]) -> Row:
    """The row of one size, from the measurements of all ranks."""
    size = by_rank[0]["size_bytes"]
    seconds = [max(each) for each in zip(*(rank["seconds"] for rank in by_rank))]
    median = statistics.median(seconds)
    on_busiest_nic = route.nic_factor * size
    cpu_seconds = sum(rank["cpu_seconds"] for rank in by_rank) / len(seconds)
    gradient = route.least_factor * size  # 0: all ranks are on one host, and add up in memory
    return {
        **transport_columns(args),
        "ranks_per_host": args.ranks_per_host,
        "link": link,
        "flow_bandwidth": args.flow_bandwidth,
        "partition": args.partition,
        "credit": args.credit,
        "size_bytes": size,
        "repetitions": len(seconds),
        "milliseconds": 1e3 * median,
        "milliseconds_min": 1e3 * min(seconds),
        "milliseconds_max": 1e3 * max(seconds),
        "bytes_factor": route.nic_factor,
        "algbw_megabytes_per_second": size / median / 1e6,
        "busbw_megabytes_per_second": on_busiest_nic / median / 1e6,
        "link_share": link_share(on_busiest_nic, median, args.bandwidth),
        "network_bytes": round(route.network_factor * size),
        "cpu_seconds_per_gigabyte": cpu_seconds / gradient * 1e9 if gradient else None,
        "wrong_elements": sum(rank["wrong_elements"] for rank in by_rank),
    }


# --- in each rank's process ---


def rank_main(session: Session, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measurements of this rank for each of ``arguments["sizes"]``. Rank 0 includes the servers' CPU time."""
    pids = arguments["server_pids"] if session.rank == 0 else []
    barrier = register(session, "barrier", FLOAT32_BYTES)[1]
    return [_measure(session, barrier, size, arguments, pids) for size in arguments["sizes"]]


def _measure(
    session: Session, barrier: TensorGroup, size: int, arguments: Mapping[str, Any], server_pids: Sequence[int]
) -> dict[str, Any]:
    repetitions, period = arguments["repetitions"], arguments["period"]
    buffer, group = register(session, f"{size} bytes", size)
    pattern = (np.arange(buffer.size) % period).astype(np.float32)
    seconds, used, wrong = [], 0.0, 0
    for repetition in range(-arguments["warmup"], repetitions):
        shift = repetition % min(period, 64)
        np.add(pattern, shift + session.rank, out=buffer)
        average(barrier)
        cpu_began, began = cpu_seconds(server_pids), time.monotonic()
        average(group)
        ended = time.monotonic()
        average(barrier)  # serving the other ranks is part of the cost
        if repetition >= 0:
            seconds.append(ended - began)
            used += cpu_seconds(server_pids) - cpu_began
        wrong += int(np.count_nonzero(buffer != pattern + (shift + (session.world_size - 1) / 2)))
    group.release()
    return {"size_bytes": size, "seconds": seconds, "cpu_seconds": used, "wrong_elements": wrong}
