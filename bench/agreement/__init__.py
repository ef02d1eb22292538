"""The cost of agreeing on the order of collectives: time, CPU time and messages of each launch, by order and credit.

One tensor of many partitions, all ready at once, is averaged repeatedly. Rank 0 announces the launches after the other ranks
have reported that they are ready, many of them with one message, since nothing more urgent can come. A static order needs no
messages. ``--ranks`` shows instead what rank 0 has to do in jobs of so many ranks (``rank_0.py``).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import product
from typing import Any

from commsched import ConfigError, Session
from commsched.settings import Settings, parse_seconds
from commsched.transports import users_of

from ..harness.arguments import TRANSPORT_OPTIONS, add_options, at_least, float32_bytes, transport_settings, transport_words
from ..harness.averaging import average, register
from ..harness.job import Job, run_job
from ..harness.measure import cpu_seconds
from ..harness.network_load import Route, link_share
from ..harness.results import Row, table, write
from ..harness.system import Carrier
from . import rank_0

_ORDERS = ("agreed", "static")

#: Steps until a static order is frozen: after a change of configuration, the order must first be the same for several steps.
_WARM_UP_STEPS = 9

_COLUMNS = {
    "order": "order",
    "credit_partitions": "credit (partitions)",
    "milliseconds": "ms/step",
    "link_share": "of link",
    "microseconds_per_launch": "us/launch",
    "cpu_microseconds_per_launch": "CPU us/launch",
    "messages_per_launch": "messages/launch",
}

_COLUMNS_OF_RANK_0 = {
    "ranks": "ranks",
    "ranks_per_host": "on a host",
    "order": "order",
    "received": "received/launch",
    "sent": "sent/launch",
    "cpu_microseconds": "CPU us/launch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, **{**TRANSPORT_OPTIONS, "transport": "gloo"}, bandwidth=None, repetitions=9, timeout="600", json=None)
    size_help = "size of each partition (default: 256KB)"
    parser.add_argument("--partition", type=float32_bytes, default="256KB", metavar="SIZE", help=size_help)
    parser.add_argument("--partitions", type=at_least(1), default=64, metavar="N", help="partitions in a step (default: 64)")
    ranks_help = "count what rank 0 has to do in jobs of so many ranks, in a backward pass, without a network"
    parser.add_argument("--ranks", type=at_least(2), nargs="+", metavar="N", help=ranks_help)
    per_host_help = "with --ranks: how many ranks of a host sum before the network (default: 1)"
    parser.add_argument("--ranks-per-host", type=at_least(1), nargs="+", default=[1], metavar="N", help=per_host_help)
    credits_help = "credits to measure, in partitions (default: 1 2 4 8 16)"
    parser.add_argument("--credits", type=at_least(1), nargs="+", default=[1, 2, 4, 8, 16], metavar="N", help=credits_help)


def run(args: argparse.Namespace) -> int:
    if args.ranks:
        return _show_rank_0(args)
    settings = transport_settings(args)
    if args.transport not in users_of("order"):
        raise ConfigError(f"transport={args.transport!r} has nothing to agree on: its messages carry their identity")
    job = Job(args.workers, args.servers, args.bandwidth, {**settings, "order": _ORDERS[0]}, parse_seconds(args.timeout))
    names = ("transport", "policy", "collective", "partition", "partitions", "credits", "repetitions")
    outcome = run_job(job, __name__, {name: getattr(args, name) for name in names})
    cells = product(_ORDERS, args.credits)
    rows = [_row(args, outcome.link, *cell, found) for cell, found in zip(cells, zip(*outcome.by_rank), strict=True)]
    print(
        f"{transport_words(args)}: {args.workers} workers, link {outcome.link}, {args.partitions} partitions of "
        f"{args.partition} bytes, all ready at once; CPU and messages: of all ranks together"
    )
    print(table(rows, _COLUMNS))
    write(args.json, rows)
    return 0


def _show_rank_0(args: argparse.Namespace) -> int:
    rows: list[Row] = [
        {"ranks": ranks, "ranks_per_host": per_host, "order": order, **asdict(rank_0.measure(ranks, order, per_host))}
        for per_host, ranks, order in product(args.ranks_per_host, args.ranks, _ORDERS)
        if ranks > per_host
    ]
    print("at rank 0, for each launch: messages of the order, and processor time without gRPC; 24 layers of 10 partitions")
    print(table(rows, _COLUMNS_OF_RANK_0))
    write(args.json, rows)
    return 0


def _row(args: argparse.Namespace, link: str, order: str, credit: int, by_rank: Sequence[Mapping[str, Any]]) -> Row:
    steps = [max(each) for each in zip(*(rank["seconds"] for rank in by_rank))]
    seconds = statistics.median(steps)
    launches = args.partitions * (2 if args.collective == "rsag" else 1)
    size = args.partition * args.partitions
    return {
        "transport": args.transport,
        **{name: getattr(args, name) for name in ("policy", "collective", "wire", "hierarchy", "workers")},
        "link": link,
        "order": order,
        "partition_bytes": args.partition,
        "partitions": args.partitions,
        "credit_partitions": credit,
        "repetitions": len(steps),
        "milliseconds": 1e3 * seconds,
        "link_share": link_share(Route.of(args).nic_factor * size, seconds, args.bandwidth),
        "microseconds_per_launch": 1e6 * seconds / launches,
        "cpu_microseconds_per_launch": 1e6 * sum(rank["cpu_seconds"] for rank in by_rank) / len(steps) / launches,
        "messages_per_launch": sum(rank["messages"] for rank in by_rank) / len(steps) / launches,
    }


# --- in each rank's process ---


def rank_main(session: Session, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measurements of this rank for each order and credit, in that order."""
    from ..harness.system import open_carriers

    carriers = [Carrier(arguments["transport"], order) for order in _ORDERS]
    with ExitStack() as stack:
        messages = stack.enter_context(_counted_messages())
        opened = open_carriers(session, carriers[0], carriers, stack)
        found = []
        for carrier in carriers:
            each, barrier = opened[carrier].session, opened[carrier].barrier
            _, group = register(each, f"{carrier.order} order", arguments["partition"] * arguments["partitions"])
            for credit in arguments["credits"]:
                size, kind = arguments["partition"], {name: arguments[name] for name in ("policy", "collective")}
                barrier.switch(Settings(partition=size, credit=credit * size, order=carrier.order, **kind).scheduler)
                step = functools.partial(average, group)
                found.append(_measure(each, step, arguments["repetitions"], messages))
        return found


def _measure(session: Session, step: Callable[[], None], repetitions: int, messages: Callable[[], int]) -> dict[str, Any]:
    for _ in range(_WARM_UP_STEPS):
        step()
    session.gather("begin")
    cpu_began, messages_began, seconds = cpu_seconds(), messages(), []
    for _ in range(repetitions):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    counted = messages() - messages_began
    session.gather("end")  # serving the other ranks is part of the cost
    return {"seconds": seconds, "cpu_seconds": cpu_seconds() - cpu_began, "messages": counted}


@contextmanager
def _counted_messages() -> Iterator[Callable[[], int]]:
    """Yields a function that returns the number of messages about the order that this process has sent so far."""
    from commsched.control.client import ControlClient

    count = 0

    def counting(send: Callable[..., None]) -> Callable[..., None]:
        def counted(client: ControlClient, *args: Any) -> None:
            nonlocal count  # only one dispatcher sends at a time: the other session of this process is idle
            count += 1
            send(client, *args)

        return counted

    tell, announce = ControlClient.send_to_rank_0, ControlClient.announce
    setattr(ControlClient, "send_to_rank_0", counting(tell))  # noqa: B010 - mypy takes an assignment for a redefinition
    setattr(ControlClient, "announce", counting(announce))  # noqa: B010
    try:
        yield lambda: count
    finally:
        setattr(ControlClient, "send_to_rank_0", tell)  # noqa: B010
        setattr(ControlClient, "announce", announce)  # noqa: B010
