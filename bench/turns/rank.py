"""One rank of ``python -m bench train``: measures the conditions, then trains with each system in turn."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from time import monotonic
from typing import Any

import torch

from commsched import ConfigError, Session
from commsched.core.world import detect_world

from ..harness.loop import Loop
from ..harness.measure import LayerTimes, rotated
from ..harness.message_cost import measure_message_seconds
from ..harness.network import measure_network, own_address, traffic
from ..harness.progress import say
from ..harness.reference import ComputeOnly, clipping_norm, largest_difference, plain_averaging
from ..harness.scheduled import chosen_sizes
from ..harness.system import Carrier, Context, OpenCarrier, System, open_carriers, timed_turn
from ..harness.timeline import Entry, Recorder
from ..systems import SYSTEMS, SystemSpec, make, parse
from ..workloads import Workload, make_workload
from ..workloads.compiled import CompiledWorkload

#: Steps that time the layers before the systems take turns. Each round adds half as many steps as a system's turn counts.
_LAYER_STEPS = 3
#: Steps with quiet links, and steps beside traffic, that show how much it slows computation down.
_SLOWED_STEPS = 3


@dataclass(frozen=True)
class Assignment:
    """The arguments of the ranks, as JSON. See ``turns.TrainOptions``.

    ``workload`` is the argument of ``make_workload``. ``systems`` are specifications for ``bench.systems``. ``carrier`` is
    that of the ranks' own session. ``nominal_rates`` are the rates of each host's link in bytes per second, workers
    before servers; None means that links are not shaped. ``capped`` says that the transport itself keeps to these rates.
    ``flow_rate`` is that of each connection, in bytes per second, on links that are shaped so.
    ``clip`` is as in ``loop.Loop``. ``launched`` says that a launcher has started the ranks: it decides on threads, and links
    are real.
    ``progress`` is a path for ``progress.say``, or "" for stdout; None means that nobody wants to know.
    """

    workload: dict[str, Any]
    systems: list[str]
    rounds: int
    steps: int
    settle: int
    carrier: dict[str, str]
    bytes_scale: float
    servers: int
    nominal_rates: list[float] | None
    capped: bool
    flow_rate: float | None = None
    clip: str | None = None
    compile: bool = False
    server_pids: list[int] = field(default_factory=list)
    launched: bool = False
    progress: str | None = None


class _Progress:
    """Tells the user what is being measured. Only rank 0 does."""

    def __init__(self, path: str | None, rank: int) -> None:
        self._path = path if rank == 0 else None
        self._began = 0.0

    def say(self, line: str) -> None:
        if self._path == "":
            print(line, flush=True)
        elif self._path is not None:
            say(self._path, line)

    def turns_begin(self) -> None:
        self._began = monotonic()

    def turn(self, done: int, turns: int, name: str, seconds: Sequence[float]) -> None:
        """Turn ``done`` of ``turns`` has ended; ``seconds`` are those of its steps."""
        left = (monotonic() - self._began) / done * (turns - done)
        remaining = f"; about {left:.0f} s left" if done < turns else ""
        self.say(f"turn {done} of {turns}: {name}, {1000 * median(seconds):.4g} ms per step{remaining}")


@dataclass
class _Found:
    """The measurements of one system. ``cpu_seconds`` is the CPU time of this rank; on rank 0 it includes all servers."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    max_difference: float = 0.0
    timeline: list[Entry] = field(default_factory=list)


def rank_main(session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Measure; return ``network`` and ``layers`` (of each rank), which are the same on every rank, and ``systems`` as measured
    on this rank."""
    task = Assignment(**arguments)
    if not task.launched:
        torch.set_num_threads(1)
    specs = [parse(text) for text in task.systems]
    own = Carrier(**task.carrier)
    with ExitStack() as stack:
        carriers = open_carriers(session, own, [spec.carrier for spec in specs if spec.carrier], stack)
        return _measure(task, specs, own, carriers)


def _measure(
    task: Assignment, specs: Sequence[SystemSpec], own: Carrier, carriers: Mapping[Carrier, OpenCarrier]
) -> dict[str, Any]:
    session, barrier = carriers[own].session, carriers[own].barrier
    progress = _Progress(task.progress, session.rank)
    workload = make_workload({**task.workload, "device": _own_device(task.workload)}, session.world_size)
    trained = CompiledWorkload(workload) if task.compile else workload
    host = own_address()
    progress.say("measuring the links")
    network = measure_network(session, host, task.nominal_rates, task.servers, task.capped, task.flow_rate)
    progress.say("timing the layers without communication")
    compute = ComputeOnly(session, barrier, workload)
    compute.measure(_LAYER_STEPS)
    slowdowns = _slowdowns(session, host, compute) if task.launched else None
    on_commsched = {spec.carrier or own for spec in specs if SYSTEMS[spec.base].is_on_commsched}
    max_norm = session.gather(clipping_norm(workload, session.world_size))[0] if task.clip == "norm" else 0.0
    contexts = {}
    for carrier in dict.fromkeys(spec.carrier or own for spec in specs):
        opened = carriers[carrier]
        context = Context(
            opened.session,
            opened.barrier,
            trained,
            host,
            carrier,
            task.bytes_scale,
            partition_bytes=0,
            credit_bytes=0,
            message_seconds=0.0,
            clip=task.clip,
            max_norm=max_norm,
            _shared=opened.shared,
        )
        if carrier in on_commsched:
            over = f"{carrier.transport}{' by reduce-scatter and all-gather' if carrier.collective == 'rsag' else ''}"
            progress.say(f"choosing partition, credit and order over {over}, and measuring the cost of a message")
            context = _with_sizes(context, network.message_bytes)
        contexts[carrier] = context
    made = {}
    for spec in specs:
        progress.say(f"preparing {spec.text}")
        made[spec.text] = make(spec.base, contexts[spec.carrier or own])
    progress.say("training as it should be, without any system")
    loop = Loop(task.clip, max_norm, workload.device)
    layers, found = _take_turns(task, carriers[own], workload, compute, made, loop, progress)
    return {
        "slowdowns": slowdowns,
        "network": asdict(network),
        "layers": [asdict(each) for each in layers],
        "systems": {name: {**asdict(system.setup), **asdict(found[name])} for name, system in made.items()},
    }


def _own_device(workload: Mapping[str, Any]) -> str:
    """The device of this rank's model."""
    if workload.get("device", "cpu") == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no GPU that it can use here")
    number = detect_world(os.environ).local_rank % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return f"cuda:{number}"


def _slowdowns(session: Session, host: str, compute: ComputeOnly) -> list[float]:
    """How many times as long the computation of each rank takes while all links are full."""
    quiet = compute.least_step_seconds(_SLOWED_STEPS)
    with traffic(session, host):
        busy = compute.least_step_seconds(_SLOWED_STEPS)
    return [max(1.0, slowed / alone) for slowed, alone in zip(busy, quiet, strict=True)]


def _with_sizes(context: Context, message_bytes: int) -> Context:
    """Let the sizes of ``context`` choose themselves, and measure the cost of a partition. Collective."""
    config = context.shared(chosen_sizes)  # once for each session: measuring the cost changes its configuration
    seconds = measure_message_seconds(context.session, context.barrier, message_bytes, context.carrier.collective)
    return replace(
        context,
        partition_bytes=config.partition_bytes,
        credit_bytes=config.credit_bytes,
        order=config.order,
        message_seconds=seconds,
    )


def _take_turns(
    task: Assignment,
    opened: OpenCarrier,
    workload: Workload,
    compute: ComputeOnly,
    made: Mapping[str, System],
    loop: Loop,
    progress: _Progress,
) -> tuple[list[LayerTimes], dict[str, _Found]]:
    """Alternate between training without communication and all systems, so that all are exposed to the same network and the
    same noise. Each round starts with another system, so that no system always follows the same one."""
    found = {name: _Found() for name in made}
    wanted = plain_averaging(workload, task.settle + task.steps, opened.session.world_size, loop)
    progress.turns_begin()
    for turn in range(task.rounds):
        layers = compute.measure(-(-task.steps // 2))
        for number, name in enumerate(rotated(list(made), turn), 1):
            system = made[name]
            server_pids = task.server_pids if opened.session.rank == 0 else []  # each server counts once
            seconds, cpu = timed_turn(system, opened.barrier, task.settle, task.steps, server_pids, workload.device)
            found[name].seconds += seconds
            found[name].cpu_seconds += cpu
            difference = largest_difference(system.model, wanted, system.initial)
            found[name].max_difference = max(found[name].max_difference, difference)
            progress.turn(turn * len(made) + number, task.rounds * len(made), name, seconds)
            if turn == task.rounds - 1 and workload.device == "cpu":  # the times of a device are not those of its host
                found[name].timeline = _timeline(system, layers[0])
    return layers, found


def _timeline(system: System, layers: LayerTimes) -> list[Entry]:
    """The timeline of one more iteration with the same settings: a backward, and the forward after it."""
    recorder = Recorder(system.model)
    system.observe(recorder)
    loss = system.forward(0)
    recorder.backward_begins()
    system.update(loss)
    with recorder.forward_of_next_step(), torch.no_grad():
        system.forward(1)
    system.end()
    recorder.stop()
    return recorder.timeline(layers.names, layers.nbytes)
