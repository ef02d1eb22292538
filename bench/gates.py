"""What the PyTorch plugin costs by itself: the read of a guarded tensor, and a step of many small parameters.

The step is that of one rank, over a transport that takes no time and a control channel that echoes: what is timed is this
process's Python, and neither network nor other ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

import commsched.plugins.torch as cs
from commsched.control.listener import Listener
from commsched.core.config import SchedulerConfig
from commsched.core.errors import CommschedError
from commsched.core.world import World
from commsched.plugins.torch.guard import guard, release
from commsched.session import Session

from .arguments import at_least
from .measure import median_interval
from .overhead import Immediate
from .results import Row, add_json_argument, table, write

_WIDTH = 16
#: Parameters of one timed block: so many steps of a small model are timed together.
_BLOCK_PARAMETERS = 300

_READ_TENSORS = 200

_READ_COLUMNS = {
    "operation": "operation",
    "plain_microseconds": "plain us",
    "first_microseconds": "first read us",
    "later_microseconds": "later reads us",
    "guard_microseconds": "to guard us",
}
_STEP_COLUMNS = {
    "parameters": "parameters",
    "plain_milliseconds": "plain ms/step",
    "one_rank_milliseconds": "one rank",
    "one_rank_ratio": "of plain",
    "one_rank_ratio_low": "low",
    "one_rank_ratio_high": "high",
    "two_ranks_milliseconds": "of two ranks",
    "two_ranks_added_microseconds": "added us/parameter",
}

_OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda tensor: tensor.view(-1),
    "add": lambda tensor: tensor + tensor,
    "linear": lambda tensor: nn.functional.linear(tensor, tensor),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parameters",
        type=at_least(1),
        nargs="+",
        default=[10, 100, 1000],
        metavar="N",
        help=f"of {_WIDTH}x{_WIDTH} float32 in the model (default: 10 100 1000)",
    )
    parser.add_argument("--rounds", type=at_least(1), default=20, metavar="N", help="A B B A of each pair (default: 20)")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reads = [measure_reads(operation, args.rounds) for operation in _OPERATIONS]
        steps = [measure_steps(parameters, args.rounds) for parameters in args.parameters]
    finally:
        torch.set_num_threads(threads)
    print(f"one operation on a {_WIDTH}x{_WIDTH} tensor; the first read of a guarded one settles it, and later ones are plain")
    print(table(reads, _READ_COLUMNS))
    print(
        f"\nforward, backward and step() of {_WIDTH}x{_WIDTH} layers; of two ranks, one is timed, over a network without delay"
    )
    print(table(steps, _STEP_COLUMNS))
    if args.json:
        write(args.json, [*reads, *steps])
    return 0


# --- one read ---


def measure_reads(operation: str, rounds: int, tensors: int = _READ_TENSORS) -> Row:
    """What ``operation`` takes on a plain tensor, on a guarded one the first time, and after it: medians of ``rounds``."""
    operate = _OPERATIONS[operation]
    parameters = [nn.Parameter(torch.eye(_WIDTH)) for _ in range(tensors)]

    def read_all() -> None:
        for parameter in parameters:
            operate(parameter)

    def guard_all() -> None:
        for parameter in parameters:
            guard(parameter, partial(release, parameter))

    read_all()
    samples: dict[str, list[float]] = {"plain": [], "guard": [], "first": [], "later": []}
    with torch.no_grad():
        for _ in range(rounds):
            for name, what in (("plain", read_all), ("guard", guard_all), ("first", read_all), ("later", read_all)):
                samples[name].append(1e6 * _seconds(what) / tensors)
    medians = {f"{name}_microseconds": median(values) for name, values in samples.items()}
    return {"operation": operation, "rounds": rounds, **medians}


# --- one step ---


class OfTwo(Immediate):
    """One of two ranks, both of which have the same gradients."""

    world_size = 2


class _Echo:
    """The control channel of a job in which every rank says what this one says."""

    clock_offset_seconds = 0.0

    def __init__(self, world_size: int, listener: Listener) -> None:
        self._world_size = world_size
        self._listener = listener

    def gather(self, tag: str, value: Any) -> list[Any]:
        return [value] * self._world_size

    def report(self, error: CommschedError) -> None:
        self._listener.on_failure(error)

    def tell(self, value: Any) -> None: ...

    def announce(self, value: Any) -> None: ...

    def propose(self, config: dict[str, Any]) -> None: ...

    def leave(self) -> None: ...

    def wait_until_all_left(self) -> None: ...

    def close(self) -> None: ...


def open_session(transport: Immediate) -> Session:
    size = transport.world_size
    return Session(
        World(0, size, 0, size, "bench"),
        SchedulerConfig(),
        open_control=lambda listener: _Echo(size, listener),
        open_transport=lambda _: transport,
    )


def training(parameters: int, session: Session | None) -> tuple[Callable[[], None], nn.Module]:
    """One step of a model, scheduled unless there is no ``session``, and the model."""
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(parameters)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.eye(_WIDTH))  # the product of a thousand neither vanishes nor explodes
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    if session is not None:
        optimizer = cs.ScheduledOptimizer(optimizer, model, session=session)
    inputs = torch.ones(_WIDTH, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()

    return step, model


def measure_steps(parameters: int, rounds: int) -> Row:
    """Milliseconds per step of plain torch, of the only rank and of one of two: medians, those of comparisons too, which are
    within each of ``rounds``."""
    steps_per_block = max(1, _BLOCK_PARAMETERS // parameters)

    def block(step: Callable[[], None]) -> float:
        began = perf_counter()
        for _ in range(steps_per_block):
            step()
        return 1e3 * (perf_counter() - began) / steps_per_block

    with ExitStack() as stack:
        sessions = [stack.enter_context(open_session(transport)) for transport in (Immediate(), OfTwo())]
        plain, one, two = (partial(block, training(parameters, session)[0]) for session in (None, *sessions))
        of_one, of_two = _side_by_side(plain, one, rounds), _side_by_side(plain, two, rounds)
    ratio = median_interval([mine / theirs for theirs, mine in of_one])
    return {
        "parameters": parameters,
        "rounds": rounds,
        "plain_milliseconds": median(theirs for theirs, _ in of_one),
        "one_rank_milliseconds": median(mine for _, mine in of_one),
        "one_rank_ratio": ratio["median"],
        "one_rank_ratio_low": ratio["low"],
        "one_rank_ratio_high": ratio["high"],
        "two_ranks_milliseconds": median(mine for _, mine in of_two),
        "two_ranks_added_microseconds": 1e3 * median(mine - theirs for theirs, mine in of_two) / parameters,
    }


def _side_by_side(a: Callable[[], float], b: Callable[[], float], rounds: int) -> list[tuple[float, float]]:
    """What ``a`` and ``b`` come to in each round, A B B A or B A A B: a drift is charged to neither, nor what follows what."""
    a(), b()  # warm-up
    pairs = []
    for index in range(rounds):
        first, second = (a, b) if index % 2 == 0 else (b, a)
        there, middle = first(), (second() + second()) / 2
        outer = (there + first()) / 2
        pairs.append((outer, middle) if first is a else (middle, outer))
    return pairs


def _seconds(what: Callable[[], Any]) -> float:
    began = perf_counter()
    what()
    return perf_counter() - began
