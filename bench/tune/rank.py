"""One rank of ``python -m bench tune``: trains with every configuration of a grid, and with the sizes that the job itself
chooses, in turn, pass after pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from commsched import SchedulerConfig, Session
from commsched.core.manifest import Manifest
from commsched.tuner.learn import PROFILE_STEPS
from commsched.tuner.profiler import Profiler

from ..harness.averaging import ConfigBarrier
from ..harness.message_cost import measure_message_seconds
from ..harness.network import measure_network, own_address
from ..harness.progress import say
from ..harness.reference import ComputeOnly, largest_difference, plain_averaging
from ..harness.scheduled import ScheduledSystem, chosen_sizes
from ..harness.system import Carrier, Context, timed_turn
from ..workloads import make_workload

_LAYER_STEPS = 5


@dataclass(frozen=True)
class Assignment:
    """The arguments of the ranks, as JSON. See ``tune.TuneOptions``.

    ``configs`` are the configurations of the grid. ``orders`` has, for each pass, their indexes in the order of that pass; the
    index after the last stands for the sizes that this job has chosen itself.
    ``progress`` is a path for ``progress.say``.
    """

    workload: dict[str, Any]
    incumbent: dict[str, Any]
    configs: list[dict[str, Any]]
    orders: list[list[int]]
    settle: int
    steps: int
    transport: str
    order: str
    bytes_scale: float
    nominal_rates: list[float]
    capped: bool
    progress: str
    server_pids: list[int] = field(default_factory=list)


def rank_main(session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Measure. Returns ``network``, ``layers`` of each rank and ``message_seconds``, which are the same on every rank. Also
    returns ``chosen``, the configuration that the job has chosen; ``profiled``, the tuner's profile of training; ``passes``,
    the seconds of each step for each pass and configuration, the chosen one last; and ``max_difference`` of the weights from
    plain averaging."""
    torch.set_num_threads(1)
    task = Assignment(**arguments)
    barrier = ConfigBarrier(session)
    workload = make_workload(task.workload, session.world_size)
    host = own_address()
    network = measure_network(session, host, task.nominal_rates, 0, task.capped)
    layers = ComputeOnly(session, barrier, workload).measure(_LAYER_STEPS)
    configs = [SchedulerConfig(**record) for record in task.configs]
    context = Context(
        session,
        barrier,
        workload,
        host,
        Carrier(task.transport, task.order, configs[0].collective),
        task.bytes_scale,
        configs[0].partition_bytes,
        configs[0].credit_bytes,
        message_seconds=0.0,
        _shared={},
    )
    registered: list[tuple[int, Manifest]] = []
    session.on_register(lambda *group: registered.append(group))
    chosen = context.shared(chosen_sizes)  # before the cost of a message is measured, which changes the configuration
    trained = max(registered, key=lambda group: sum(group[1].buffer_bytes.values()))
    message_seconds = measure_message_seconds(session, barrier, network.message_bytes, configs[0].collective)
    context = replace(context, message_seconds=message_seconds)
    chosen = replace(chosen, order=configs[0].order)  # only sizes are compared
    systems = [ScheduledSystem(context, config) for config in (*configs, chosen)]
    wanted = plain_averaging(workload, task.settle + task.steps, session.world_size)
    profiled = _profile(session, ScheduledSystem(context, SchedulerConfig(**task.incumbent)), *trained, task, barrier)
    passes, largest = [], 0.0
    began = perf_counter()
    for number, order in enumerate(task.orders, 1):
        windows: list[list[float]] = [[] for _ in systems]
        for place in order:
            windows[place] = timed_turn(systems[place], barrier, task.settle, task.steps)[0]
            difference = largest_difference(systems[place].model, wanted, systems[place].initial)
            largest = max(largest, difference)
        passes.append(windows)
        if session.rank == 0:
            took, passes_left = perf_counter() - began, len(task.orders) - number
            left = f"; about {took / number * passes_left:.0f} s left" if passes_left else ""
            done = f"pass {number} of {len(task.orders)}: {len(order)} windows, {took:.0f} s so far{left}"
            say(task.progress, done)
    return {
        "network": asdict(network),
        "layers": [asdict(each) for each in layers],
        "message_seconds": message_seconds,
        "chosen": chosen.to_record(),
        "profiled": profiled,
        "passes": passes,
        "max_difference": largest,
    }


def _profile(
    session: Session, system: ScheduledSystem, group: int, manifest: Manifest, task: Assignment, barrier: ConfigBarrier
) -> dict[str, Any] | None:
    """The result of the tuner's profiler for a few steps, with the configuration that the tuner would use there."""
    profiler = Profiler(group, PROFILE_STEPS)
    forget = session.observe(profiler)
    timed_turn(system, barrier, task.settle, task.steps)
    profiler.stop()
    forget()
    measured = profiler.result(manifest, ordered=task.transport != "ps")
    if measured is None:
        return None
    return {
        "profile": measured.profile.to_record(),
        "link": asdict(measured.link),
        "step_seconds": measured.step_seconds,
    }
