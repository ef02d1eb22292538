"""The cost of a step that can be taken back: the same training without commsched.Elastic, with it in a job that is not elastic,
and in an elastic job, in turn in the same processes.

The cost is that of the copies of what an update replaces, so it depends on how much a step computes for each parameter: there
are rows for each size of the batch. No rank is lost here; ``python -m tests.soak elastic`` says what a loss takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import nn

import commsched
import commsched.plugins.torch as cs
from commsched import Session
from commsched.control.elastic_messages import Place

from .harness.arguments import add_options, at_least, list_of
from .harness.job import Job, run_job
from .harness.measure import beside, beside_columns, rotated
from .harness.processes import JobFailed
from .harness.results import Row, table, write

_WARM_UP_STEPS = 4
_UNCOUNTED_STEPS = 1  # of each turn
_STEPS_TO_ASK = 4  # between two questions whether sizes are chosen
_TIMEOUT_SECONDS = 1800.0

#: The ways to train: without an Elastic; with one, in an ordinary job; and in an elastic job, with each ``keep``. On the CPU
#: keep="cpu" is the same as keep="device".
_PLAIN, _ORDINARY = "no Elastic", "Elastic, without --elastic"
_KEEPS = {"--elastic": "device", '--elastic, keep="nothing"': "nothing"}

_COLUMNS = {"batch": "batch", "way": "way", **beside_columns(_PLAIN)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=at_least(1), default=8, metavar="N", help="layers of the model (default: 8)")
    parser.add_argument("--width", type=at_least(1), default=512, metavar="N", help="width of each layer (default: 512)")
    batches_help = "samples of a step, separated by commas (default: 64,512,2048)"
    parser.add_argument("--batches", type=list_of(at_least(1)), default=(64, 512, 2048), metavar="N,...", help=batches_help)
    add_options(parser, workers=2, rounds=12, steps=3, json=None)


def run(args: argparse.Namespace) -> int:
    rows: list[Row] = []
    for batch in args.batches:
        arguments = {"layers": args.layers, "width": args.width, "batch": batch, "rounds": args.rounds, "steps": args.steps}
        job = Job(args.workers, settings={"transport": "ps"}, timeout_seconds=_TIMEOUT_SECONDS, auto_sizes=True)
        by_rank = run_job(job, __name__, arguments).by_rank
        rows += [{**arguments, "workers": args.workers, "way": way, **beside(_PLAIN, way, by_rank)} for way in by_rank[0]]
    parameters = args.layers * args.width * args.width
    print(f"a step of AdamW, {parameters} parameters in {args.layers} layers, {args.workers} ranks on loopback, in turn")
    print(table(rows, _COLUMNS))
    write(args.json, rows)
    return 0


# --- in each rank's process ---


@dataclass
class _Training:
    """One way to train. ``seconds``: of a step, by turn."""

    step: Callable[[], None]
    finish: Callable[[], None]
    model: nn.Module
    seconds: list[float] = field(default_factory=list)


def rank_main(session: Session, arguments: Mapping[str, Any]) -> dict[str, list[float]]:
    """The seconds of a step, by turn and way.

    Raises:
        JobFailed: the ways train to different weights.
    """
    torch.set_num_threads(1)
    made = {way: _training(session, arguments, way) for way in (_PLAIN, _ORDINARY, *_KEEPS)}
    _choose_sizes(list(made.values()), session)
    for turn in range(-1, arguments["rounds"]):
        for way in rotated(list(made), turn):
            session.gather(f"turn {turn} of {way}")
            _take_turn(made[way], arguments["steps"] if turn >= 0 else _WARM_UP_STEPS, counts=turn >= 0)
    wanted = _weights(made[_PLAIN])
    for way, training in made.items():
        if not torch.equal(_weights(training), wanted):
            raise JobFailed(f"the weights of {way!r} are not those of {_PLAIN!r}")
    return {way: training.seconds for way, training in made.items()}


def _training(session: Session, arguments: Mapping[str, Any], way: str) -> _Training:
    torch.manual_seed(0)
    layers = [
        each
        for _ in range(arguments["layers"])
        for each in (nn.Linear(arguments["width"], arguments["width"], bias=False), nn.ReLU())
    ]
    model = nn.Sequential(*layers)
    optimizer = cs.ScheduledOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model, session=session)
    generator = torch.Generator().manual_seed(1 + session.rank)
    inputs = torch.randn(arguments["batch"], arguments["width"], generator=generator)

    def train() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    if way == _PLAIN:
        return _Training(train, optimizer.synchronize, model)
    elastic = _elastic(session, optimizer, way)
    steps = elastic.steps(1_000_000)

    def step() -> None:
        with next(steps):
            train()

    return _Training(step, optimizer.synchronize, model)


def _elastic(session: Session, optimizer: cs.ScheduledOptimizer, way: str) -> commsched.Elastic:
    if way == _ORDINARY:
        return commsched.Elastic(optimizer)
    place = Place(1, session.rank, session.world_size, session.rank, session.world_size, 0, 0, "127.0.0.1", "")
    session.place = place  # as under --elastic, for this one
    try:
        return commsched.Elastic(optimizer, keep=_KEEPS[way])  # type: ignore[arg-type]
    finally:
        session.place = None


def _choose_sizes(trainings: Sequence[_Training], session: Session) -> None:
    """Train until partition and credit have chosen themselves: the search would take processor time from what is measured
    meanwhile. All take equally many steps, because their weights are compared. Collective."""
    while not session.gather(session.is_settled)[0]:
        for training in trainings:
            _take_steps(training, _STEPS_TO_ASK)
            training.finish()


def _take_steps(training: _Training, steps: int) -> None:
    for _ in range(steps):
        training.step()


def _take_turn(training: _Training, steps: int, counts: bool) -> None:
    _take_steps(training, _UNCOUNTED_STEPS)
    began = perf_counter()
    _take_steps(training, steps)
    training.finish()
    if counts:
        training.seconds.append((perf_counter() - began) / steps)


def _weights(training: _Training) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in training.model.parameters()])
