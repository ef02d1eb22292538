"""One rank of a turn of ``python -m bench engines``: one system of one engine trains."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from commsched import Session
from commsched.simulator.profile import Profile

from ..harness.averaging import ConfigBarrier
from ..harness.measure import LayerTimes
from ..harness.network import measure_network, own_address
from ..harness.network_load import seconds_per_byte
from ..harness.partition_choice import choose, measure_message_cost
from .emulated import difference, plain_averaging
from .turn import Turn, systems_of


@dataclass(frozen=True)
class Assignment:
    """The arguments of the ranks, as JSON. ``nominal_rates`` and ``capped`` are as in ``turns.rank.Assignment``. ``steps``
    steps count, after ``settle`` steps that do not; the first of these compile and start the engine's processes."""

    engine: str
    system: str
    profile: dict[str, Any]
    settle: int
    steps: int
    partition: str
    credit: str
    nominal_rates: list[float] | None
    capped: bool
    server_pids: list[int] = field(default_factory=list)


def rank_main(session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Measure on this rank. Returns ``seconds`` of each counted step, mean ``cpu_seconds`` of a step, ``max_difference`` of the
    weights from plain averaging (None for asynchronous training), ``network``, and ``sizes`` with commsched's configuration.
    """
    # An engine that uses OpenMP gets one thread, as PyTorch does in ``bench train``. Idle threads spin. In several processes
    # that share the cores, each layer then waits for the last thread: MXNet's steps took up to four times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    task = Assignment(**arguments)
    profile = Profile.from_record(task.profile)
    train = systems_of(task.engine)[task.system]
    host = own_address()
    network = measure_network(session, host, task.nominal_rates, 0, task.capped)
    hosts = session.gather(host)
    sizes = None
    if task.system == "commsched":
        sizes = _configure(session, task, LayerTimes.of(profile), seconds_per_byte(network.worker_rates), network.message_bytes)
    turn = Turn(session, profile, task.settle + task.steps, hosts)
    weights = train(turn)
    ended, cpu = turn.steps.ended, turn.steps.cpu_seconds
    if len(ended) != turn.count:
        raise RuntimeError(f"{task.system} was to train {turn.count} steps, and reported {len(ended)}")
    wanted = plain_averaging(profile, turn.count, session.world_size)
    return {
        "seconds": [end - begin for begin, end in pairwise(ended)][task.settle - 1 :],
        "cpu_seconds": (cpu[-1] - cpu[task.settle - 1]) / task.steps,
        "max_difference": None if weights is None else difference(weights, wanted),
        "network": asdict(network),
        "sizes": sizes,
    }


def _configure(
    session: Session, task: Assignment, layers: LayerTimes, per_byte: float, message_bytes: int
) -> tuple[int, int, float]:
    """Choose partition and credit and switch the session to them. Returns both in bytes, and the overhead of a partition.
    Collective."""
    barrier = ConfigBarrier(session)
    cost = measure_message_cost(session, barrier, message_bytes)
    partition, credit = choose(task.partition, task.credit, [layers], per_byte, cost, session.world_size, 0)
    partition, credit = session.gather([partition, credit])[0]
    barrier.switch(replace(session.core.config, partition_bytes=partition, credit_bytes=credit))
    return partition, credit, cost.link_seconds
