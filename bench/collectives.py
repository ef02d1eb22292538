"""Averages one tensor of each of several sizes, in one process per rank, and says how fast, how dear and how right.

How long: from a common start to the last rank that has the average in place; the median over repetitions. How fast:
``algbw`` is the tensor's bytes by that time, ``busbw`` is ``algbw`` times the bytes that the busiest NIC carries in each
direction per byte of tensor, so that it compares with the link. How dear: CPU time of all processes, ranks and servers, by
the bytes of payload that crossed the network, each counted once; a rank's own shard is no network.

A shaped link lets a burst through before its rate counts, so what share of it was filled is said only of tensors of many
bursts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from commsched.core.config import Settings, parse_bytes, parse_rate, parse_seconds
from commsched.core.manifest import Manifest, TensorSpec
from commsched.transports import require_transport

from .arguments import FLOAT32_BYTES, at_least, float32_sizes, setting
from .cluster import BURST_BYTES
from .cpu_time import cpu_seconds
from .job import Job, run_job
from .nic_load import bytes_factor
from .results import Row, add_json_argument, table, write

if TYPE_CHECKING:
    from commsched.core.group import TensorGroup
    from commsched.session import Session

#: The link's share is said of tensors at least so many bursts long.
_BURSTS = 10

_COLUMNS = {
    "size_bytes": "size (B)",
    "milliseconds": "time (ms)",
    "milliseconds_min": "min",
    "milliseconds_max": "max",
    "algbw_megabytes_per_second": "algbw (MB/s)",
    "busbw_megabytes_per_second": "busbw (MB/s)",
    "link_share": "of link",
    "cpu_seconds_per_gigabyte": "CPU s/GB",
    "wrong_elements": "#wrong",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transport", default="ps", help="the way gradients travel (default: ps)")
    parser.add_argument("--lane", default="tcp", help="of the parameter server: tcp, grpc (default: tcp)")
    parser.add_argument("--workers", type=at_least(2), default=2, metavar="N", help="ranks, a process each (default: 2)")
    parser.add_argument(
        "--servers", type=at_least(0), default=0, metavar="K", help="separate servers; 0: a shard on every rank"
    )
    parser.add_argument("--bandwidth", type=setting(parse_rate), metavar="RATE", help="of each link, as 1gbit; none: loopback")
    parser.add_argument(
        "--partition", type=setting(parse_bytes), default="4MB", metavar="SIZE", help="largest one (default: 4MB)"
    )
    parser.add_argument("--credit", type=setting(parse_bytes), default="16MB", metavar="SIZE", help="in flight (default: 16MB)")
    sizes_help = "FROM:TO, FROM:TO:FACTOR or SIZE,SIZE,... (default: 64KB:64MB, by factors of 4)"
    parser.add_argument("--sizes", type=float32_sizes, default="64KB:64MB", help=sizes_help)
    parser.add_argument("--repetitions", type=at_least(1), default=9, metavar="N", help="timed ones per size (default: 9)")
    parser.add_argument("--warmup", type=at_least(0), default=2, metavar="N", help="untimed ones per size (default: 2)")
    parser.add_argument(
        "--timeout", type=setting(parse_seconds), default="600", metavar="SECONDS", help="for all (default: 600)"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    settings = {name: getattr(args, name) for name in ("transport", "lane", "partition", "credit")}
    check_settings(settings)
    job = Job(args.workers, args.servers, args.bandwidth, settings, parse_seconds(args.timeout))
    arguments = {"sizes": args.sizes, "repetitions": args.repetitions, "warmup": args.warmup}
    outcome = run_job(job, __name__, arguments)
    rows = [_row(args, outcome.link, [rank[index] for rank in outcome.by_rank]) for index in range(len(args.sizes))]
    print(_heading(args, outcome.link))
    print(table(rows, _COLUMNS))
    if args.json:
        write(args.json, rows)
    return 1 if any(row["wrong_elements"] for row in rows) else 0


def check_settings(settings: Mapping[str, str]) -> None:
    """Raise ConfigError for a mistake here, so that it is said once, and before anything starts."""
    require_transport(Settings.load(settings, {}).transport)


def _heading(args: argparse.Namespace, link: str) -> str:
    where = f"{args.servers} separate servers" if args.servers else "a shard on every rank"
    return (
        f"{args.transport} over {args.lane}: {args.workers} workers, {where}, link {link}, partition {args.partition}, "
        f"credit {args.credit}\n"
        f"busbw = algbw x {bytes_factor(args.workers, args.servers):.4g}, the bytes that the busiest NIC carries in each "
        "direction per byte of tensor\nCPU s: of all processes together, per GB of payload that crossed the network"
    )


def _row(args: argparse.Namespace, link: str, by_rank: Sequence[Mapping[str, Any]]) -> Row:
    """One size's figures from those of every rank."""
    size = by_rank[0]["size_bytes"]
    seconds = [max(each) for each in zip(*(rank["seconds"] for rank in by_rank))]
    median = statistics.median(seconds)
    factor = bytes_factor(args.workers, args.servers)
    busbw = factor * size / median
    # Of every tensor each worker pushes what it does not aggregate itself, and gets as much back.
    carried = 2 * size * (args.workers if args.servers else args.workers - 1)
    return {
        "transport": args.transport,
        "lane": args.lane if args.transport == "ps" else None,
        "workers": args.workers,
        "servers": args.servers,
        "link": link,
        "partition": args.partition,
        "credit": args.credit,
        "size_bytes": size,
        "repetitions": len(seconds),
        "milliseconds": 1e3 * median,
        "milliseconds_min": 1e3 * min(seconds),
        "milliseconds_max": 1e3 * max(seconds),
        "bytes_factor": factor,
        "algbw_megabytes_per_second": size / median / 1e6,
        "busbw_megabytes_per_second": busbw / 1e6,
        "link_share": busbw / parse_rate(args.bandwidth) if args.bandwidth and size >= _BURSTS * BURST_BYTES else None,
        "network_bytes": carried,
        "cpu_seconds_per_gigabyte": sum(rank["cpu_seconds"] for rank in by_rank) / len(seconds) / carried * 1e9,
        "wrong_elements": sum(rank["wrong_elements"] for rank in by_rank),
    }


# --- in each rank's process ---


def rank_main(session: Session, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What this rank measured for each of ``arguments["sizes"]``; rank 0 counts the servers' CPU time as its own."""
    pids = arguments["server_pids"] if session.rank == 0 else []
    start_line = register(session, "start line", FLOAT32_BYTES)[1]
    return [
        _measure(session, start_line, size, arguments["repetitions"], arguments["warmup"], pids) for size in arguments["sizes"]
    ]


def register(session: Session, name: str, nbytes: int) -> tuple[np.ndarray, TensorGroup]:
    """A float32 tensor that the ranks average: its memory, and the group that holds nothing but it."""
    buffer = np.zeros(nbytes // FLOAT32_BYTES, np.float32)
    manifest = Manifest((TensorSpec(name, buffer.shape, "float32"),))
    return buffer, session.register(manifest, {"float32": buffer.view(np.uint8).data})


def average(group: TensorGroup) -> None:
    """One step of a group of one tensor."""
    group.begin_step()
    group.notify_ready(0)
    group.proxies[0].wait()


def _measure(
    session: Session, start_line: TensorGroup, size: int, repetitions: int, warmup: int, server_pids: Sequence[int]
) -> dict[str, Any]:
    buffer, group = register(session, f"{size} bytes", size)
    # Small whole numbers: float32 holds their sum, and its quotient by the number of ranks, exactly.
    pattern = (np.arange(buffer.size) % 8191).astype(np.float32)
    seconds, used, wrong = [], 0.0, 0
    for repetition in range(-warmup, repetitions):
        np.add(pattern, repetition % 64 + session.rank, out=buffer)
        average(start_line)
        cpu_began, began = cpu_seconds(server_pids), time.monotonic()
        average(group)
        ended = time.monotonic()
        average(start_line)  # what serves the other ranks belongs to the cost too
        if repetition >= 0:
            seconds.append(ended - began)
            used += cpu_seconds(server_pids) - cpu_began
        wrong += int(np.count_nonzero(buffer != pattern + (repetition % 64 + (session.world_size - 1) / 2)))
    group.release()
    return {"size_bytes": size, "seconds": seconds, "cpu_seconds": used, "wrong_elements": wrong}
