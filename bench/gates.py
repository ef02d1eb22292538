"""The cost of the PyTorch plugin by itself: the read of a guarded tensor, a step of small parameters, the check of clipping,
and the comparison of weights.

The step runs on one rank, over a transport that takes no time and a control channel that echoes. The times are therefore of
this process's Python only, without network or other ranks.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import nn

import commsched.plugins.torch as cs
from commsched import SchedulerConfig, Session, TransportError
from commsched.control.end import ControlEnd
from commsched.control.messages import Gather, Member, Message
from commsched.core.core import Core
from commsched.plugins.torch.compared import ComparedWeights
from commsched.plugins.torch.guard import guard, release
from commsched.plugins.torch.samples import Samples, first_sample_difference
from commsched.settings import Settings

from .harness.arguments import add_options, at_least
from .harness.immediate import Immediate
from .harness.measure import median_interval
from .harness.results import Row, table, write

_WIDTH = 16
#: Parameters per timed block: several steps of a small model are timed together.
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
    "two_ranks_milliseconds": "one of two ranks",
    "two_ranks_added_microseconds": "added us/parameter",
}

_CLIPPING_COLUMNS = {
    "gradients": "gradients",
    "megabytes": "MB",
    "clip_milliseconds": "clip_grad_norm_ CPU ms",
    "check_milliseconds": "check CPU ms",
    "check_ratio": "of clipping",
}

_COMPARISON_COLUMNS = {
    "megabytes": "MB of weights",
    "step_milliseconds": "step without, CPU ms",
    "comparison_milliseconds": "a comparison, CPU ms",
    "every": "steps between two",
    "added_microseconds": "added us/step",
    "added_percent": "% of a step",
}

#: The model whose weights are compared: layers, their width and the rows of a batch.
_COMPARED = (25, 1000, 32)

#: Gradients that are clipped: number, shape and dtype.
_CLIPPED = [(100, (1000, 1000), torch.float32), (100, (1000, 1000), torch.bfloat16), (2000, (64,), torch.float32)]

_OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda tensor: tensor.view(-1),
    "add": lambda tensor: tensor + tensor,
    "linear": lambda tensor: nn.functional.linear(tensor, tensor),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parameters_help = f"numbers of parameters of the model, {_WIDTH}x{_WIDTH} float32 each (default: 10 100 1000)"
    parser.add_argument("--parameters", type=at_least(1), nargs="+", default=[10, 100, 1000], metavar="N", help=parameters_help)
    parser.add_argument("--rounds", type=at_least(1), default=20, metavar="N", help="comparisons of each pair (default: 20)")
    add_options(parser, json=None)


def run(args: argparse.Namespace) -> int:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reads = [measure_reads(operation, args.rounds) for operation in _OPERATIONS]
        steps = [measure_steps(parameters, args.rounds) for parameters in args.parameters]
        clipped = [measure_clipping(*case, args.rounds) for case in _CLIPPED]
        compared = measure_comparison(*_COMPARED, args.rounds)
    finally:
        torch.set_num_threads(threads)
    print(f"one operation on a {_WIDTH}x{_WIDTH} tensor; the first read of a guarded one makes its update")
    print(table(reads, _READ_COLUMNS))
    print(
        f"\nforward, backward and step() of {_WIDTH}x{_WIDTH} layers; one of two ranks is timed, over a network without delay"
    )
    print(table(steps, _STEP_COLUMNS))
    print("\nclipping by the norm of all gradients, and the check that all ranks have clipped alike")
    print(table(clipped, _CLIPPING_COLUMNS))
    print("\ncomparing a sixteenth of the weights (check_weights), beside forward, backward and step() of one of two ranks")
    print(table([compared], _COMPARISON_COLUMNS))
    write(args.json, [*reads, *steps, *clipped, compared])
    return 0


# --- one read ---


def measure_reads(operation: str, rounds: int, tensors: int = _READ_TENSORS) -> Row:
    """The time of ``operation`` on a plain tensor, and on a guarded tensor the first time and later: medians of ``rounds``."""
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
    """The transport of one of two ranks that have the same gradients."""

    world_size = 2


class _Echo(ControlEnd):
    """The control channel of a job in which every rank sends the same messages as this one."""

    def __init__(self, world_size: int) -> None:
        super().__init__(Member.thread(0, world_size), threading.Condition(), lazily=True)
        self._world_size = world_size

    def _put(self, message: Message) -> None: ...

    def report(self, error: BaseException) -> None:
        with self._changed:
            self._fail(TransportError(str(error)))

    def _give(self, message: Gather) -> list[Any]:
        return [json.loads(message.value)] * self._world_size

    def wait_until_all_left(self) -> None: ...


def open_session(transport: Immediate) -> Session:
    control = _Echo(transport.world_size)
    core = Core(transport, SchedulerConfig(), messenger=control, on_failure=control.report)
    return Session(control, transport, core)


def training(parameters: int, session: Session | None) -> tuple[Callable[[], None], nn.Module]:
    """A function that runs one step of a model, and the model. The step is scheduled if there is a ``session``."""
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
    """Milliseconds per step of plain torch, of the only rank, and of one of two ranks. All figures are medians; the comparisons
    are made within each of ``rounds``."""
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


# --- clipping ---


def measure_clipping(gradients: int, shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> Row:
    """The time to clip gradients of one of two ranks whose averages are complete, and the time to check samples of them:
    medians of the CPU time of one thread."""
    parameters = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for _ in range(gradients))
    clip, check = [], []
    with open_session(OfTwo()) as session:
        optimizer = cs.ScheduledOptimizer(torch.optim.SGD(parameters, lr=1e-6), parameters, session=session)
        torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
        assert optimizer._exchange is not None
        slots = optimizer._exchange.places.all
        assert all(parameter.grad.sum() != 0 for parameter in parameters)  # waits for the averages
        samples = Samples(slots)

        def look(turn: int) -> None:
            own = samples.of([True] * len(slots), turn, adopted=True)
            assert own is not None
            assert first_sample_difference(own.clone(), own, samples.rounding) is None

        look(0)
        for number in range(rounds):
            clip.append(1e3 * _seconds(lambda: nn.utils.clip_grad_norm_(parameters.parameters(), 1e30), process_time))
            check.append(1e3 * _seconds(partial(look, number), process_time))
        optimizer.step()
    return {
        "gradients": f"{gradients} x {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}",
        "rounds": rounds,
        "megabytes": gradients * parameters[0].nbytes / 1e6,
        "clip_milliseconds": median(clip),
        "check_milliseconds": median(check),
        "check_ratio": median(check) / median(clip),
    }


# --- comparing weights ---


def measure_comparison(layers: int, width: int, batch: int, rounds: int) -> Row:
    """The cost per step of ``check_weights`` with its default: the time of a comparison, divided by the steps between two
    comparisons. Medians of the CPU time of one thread."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    inputs = torch.ones(batch, width)
    steps, comparisons = [], []
    with open_session(OfTwo()) as session:
        optimizer = cs.ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9), model, session=session)

        def step() -> None:
            optimizer.zero_grad()
            model(inputs).mean().backward()
            optimizer.step()
            optimizer.synchronize()

        step()
        assert optimizer._exchange is not None
        places = optimizer._exchange.places
        session.check_weights = 1  # for optimizers that are made from now on
        weights = ComparedWeights(session, places.device, tuple(places.all), " of the bench")
        for number in range(rounds):
            steps.append(_seconds(step, process_time))
            comparisons.append(_seconds(partial(weights.compare, number), process_time))
    every = Settings.load({}, {}).check_weights
    return {
        "layers": layers,
        "batch": batch,
        "rounds": rounds,
        "megabytes": sum(parameter.nbytes for parameter in model.parameters()) / 1e6,
        "step_milliseconds": 1e3 * median(steps),
        "comparison_milliseconds": 1e3 * median(comparisons),
        "every": every,
        "added_microseconds": 1e6 * median(comparisons) / every,
        "added_percent": 100 * median(comparisons) / every / median(steps),
    }


def _side_by_side(a: Callable[[], float], b: Callable[[], float], rounds: int) -> list[tuple[float, float]]:
    """The results of ``a`` and ``b`` in each round, in the order A B B A or B A A B, so that neither drift nor order favours
    one."""
    a(), b()  # warm-up
    pairs = []
    for index in range(rounds):
        first, second = (a, b) if index % 2 == 0 else (b, a)
        there, middle = first(), (second() + second()) / 2
        outer = (there + first()) / 2
        pairs.append((outer, middle) if first is a else (middle, outer))
    return pairs


def _seconds(what: Callable[[], Any], clock: Callable[[], float] = perf_counter) -> float:
    began = clock()
    what()
    return clock() - began
