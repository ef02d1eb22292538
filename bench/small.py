"""A step of a model of many small parameters: commsched beside DDP over gloo, between processes on one machine.

Only calls cost time there. The comparison is therefore of the cost of each system per parameter, in Python or in C++.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commsched.plugins.torch as cs
from commsched import Session

from .harness.arguments import add_options, at_least
from .harness.ddp import FASTEST, open_process_group
from .harness.job import Job, run_job
from .harness.measure import TOLERATED_DIFFERENCE, median_interval, rotated
from .harness.processes import JobFailed
from .harness.reference import largest_difference, weights_of
from .harness.results import Row, table, write
from .harness.system import Carrier, open_carriers

_WIDTH = 8
_UNCOUNTED_STEPS = 2  # of each turn
_WARM_UP_STEPS = 10
_STEPS_TO_ASK = 4  # between two questions whether sizes are chosen
_TIMEOUT_SECONDS = 600.0

_COLUMNS = {
    "system": "system",
    "milliseconds": "ms/step",
    "ratio": "of DDP",
    "ratio_low": "low",
    "ratio_high": "high",
    "cpu_milliseconds": "CPU ms/step and rank",
    "cpu_ratio": "of DDP",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parameters_help = f"number of parameters of the model, {_WIDTH}x{_WIDTH} float32 each (default: 2000)"
    parser.add_argument("--parameters", type=at_least(1), default=2000, metavar="N", help=parameters_help)
    add_options(parser, workers=2, rounds=15, steps=6, json=None)


def run(args: argparse.Namespace) -> int:
    arguments = {"parameters": args.parameters, "rounds": args.rounds, "steps": args.steps}
    job = Job(args.workers, settings={"transport": "ps"}, timeout_seconds=_TIMEOUT_SECONDS, auto_sizes=True)
    by_rank = run_job(job, __name__, arguments).by_rank
    rows = [
        {
            **arguments,
            "workers": args.workers,
            **_row(name, [found[name] for found in by_rank], [found["ddp"] for found in by_rank]),
        }
        for name in by_rank[0]
    ]
    print(
        f"forward, backward and step() of {args.parameters} layers of {_WIDTH}x{_WIDTH}, {args.workers} ranks on loopback, "
        "in turn"
    )
    print(table(rows, _COLUMNS))
    write(args.json, rows)
    return 0


def _row(name: str, found: list[Mapping[str, Any]], ddp: list[Mapping[str, Any]]) -> Row:
    """The row of one system beside DDP, from the results by rank. A step takes as long as on the slowest rank."""
    seconds, ddp_seconds = (
        [max(turns) for turns in zip(*(each["seconds"] for each in ranks), strict=True)] for ranks in (found, ddp)
    )
    cpu, ddp_cpu = (median(second for each in ranks for second in each["cpu_seconds"]) for ranks in (found, ddp))
    ratio = median_interval([mine / theirs for mine, theirs in zip(seconds, ddp_seconds, strict=True)])
    return {
        "system": name,
        "milliseconds": 1e3 * median(seconds),
        "ratio": ratio["median"],
        "ratio_low": ratio["low"],
        "ratio_high": ratio["high"],
        "cpu_milliseconds": 1e3 * cpu,
        "cpu_ratio": cpu / ddp_cpu,
    }


# --- in each rank's process ---


@dataclass
class _System:
    """One way to train. ``finish`` completes the outstanding updates. ``session`` chooses sizes meanwhile; DDP has none.
    ``seconds`` and ``cpu_seconds`` are the times of a step, by turn."""

    step: Callable[[], None]
    finish: Callable[[], None]
    model: nn.Module
    session: Session | None = None
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


def rank_main(session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Medians of a step's seconds in each turn, by system.

    Raises:
        JobFailed: the systems train to different weights.
    """
    torch.set_num_threads(1)
    gloo = Carrier("gloo")
    with ExitStack() as stack:
        carriers = open_carriers(session, Carrier("ps"), [gloo], stack)
        open_process_group(session, "127.0.0.1")
        stack.callback(dist.destroy_process_group)
        made = {
            "ddp": _ddp(arguments["parameters"], session.rank),
            "commsched, ps": _scheduled(arguments["parameters"], session),
            "commsched, gloo": _scheduled(arguments["parameters"], carriers[gloo].session),
        }
        initial = weights_of(made["ddp"].model)
        _choose_sizes(list(made.values()), session)
        for turn in range(-1, arguments["rounds"]):
            for name in rotated(list(made), turn):
                session.gather(f"turn {turn} of {name}")
                _take_turn(made[name], arguments["steps"] if turn >= 0 else _WARM_UP_STEPS, counts=turn >= 0)
        wanted = weights_of(made["ddp"].model)
        for name, system in made.items():
            difference = largest_difference(system.model, wanted, initial)
            if difference > TOLERATED_DIFFERENCE:
                raise JobFailed(f"the weights of {name} differ from DDP's by {difference:g}")
        return {name: {"seconds": system.seconds, "cpu_seconds": system.cpu_seconds} for name, system in made.items()}


def _model(parameters: int) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(parameters)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.eye(_WIDTH))  # the product of thousands neither vanishes nor explodes
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)


def _ddp(parameters: int, rank: int) -> _System:
    model = _model(parameters)
    return _System(_step(DistributedDataParallel(model, **FASTEST), _optimizer(model), rank), lambda: None, model)


def _scheduled(parameters: int, session: Session) -> _System:
    model = _model(parameters)
    optimizer = cs.ScheduledOptimizer(_optimizer(model), model, session=session)
    return _System(_step(model, optimizer, session.rank), optimizer.synchronize, model, session)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Callable[[], None]:
    inputs = torch.full((_WIDTH, _WIDTH), 1.0 + rank)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()

    return step


def _choose_sizes(systems: Sequence[_System], session: Session) -> None:
    """Train until partitions and credits have chosen themselves: the search would take processor time from whatever is measured
    meanwhile, DDP too. All systems take equally many steps, because their weights are compared. Collective."""
    taken = []
    for system in systems:
        steps = 0
        while system.session is not None and not session.gather(system.session.is_settled)[0]:
            steps += _take_steps(system, _STEPS_TO_ASK)
        taken.append(steps)
    for system, steps in zip(systems, taken, strict=True):
        _take_steps(system, max(taken) - steps)
        system.finish()


def _take_steps(system: _System, steps: int) -> int:
    for _ in range(steps):
        system.step()
    return steps


def _take_turn(system: _System, steps: int, counts: bool) -> None:
    """Run one turn. A step lasts from the beginning of one forward to the beginning of the next. Outstanding work therefore
    counts in a later step."""
    _take_steps(system, _UNCOUNTED_STEPS)
    cpu_began, began = process_time(), perf_counter()
    _take_steps(system, steps)
    if counts:
        system.seconds.append((perf_counter() - began) / steps)
        system.cpu_seconds.append((process_time() - cpu_began) / steps)
    system.finish()
