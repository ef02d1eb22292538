"""One rank of a turn of ``python -m bench engines``: one system of one engine trains."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from commsched import Session
from commsched.simulator.profile import Profile
from commsched.tuner.auto import ROUNDS
from commsched.tuner.learn import PROFILE_TAKES
from commsched.tuner.online import SETTLE_STEPS, WARM_UP_STEPS

from ..harness.network import measure_network, own_address
from .emulated import difference, plain_averaging
from .turn import Turn, systems_of

#: Steps in which partition and credit choose themselves: the tuner's warm-up, and changes with two profiles each. Later
#: changes, of which there are few, count.
CHOOSING_STEPS = WARM_UP_STEPS + ROUNDS * (2 * PROFILE_TAKES + SETTLE_STEPS)


@dataclass(frozen=True)
class Assignment:
    """The arguments of the ranks, as JSON. ``nominal_rates`` and ``capped`` are as in ``turns.rank.Assignment``. ``steps``
    steps count, after ``settle`` steps that do not; the first of these compile and start the engine's processes.
    ``chooses_sizes``: partition, credit or both choose themselves, in steps that do not count either."""

    engine: str
    system: str
    profile: dict[str, Any]
    settle: int
    steps: int
    chooses_sizes: bool
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
    # Partition and credit choose themselves first, unless they are set. Every system makes these steps: a warm one is faster.
    settle = task.settle + (CHOOSING_STEPS if task.chooses_sizes else 0)
    turn = Turn(session, profile, settle + task.steps, hosts)
    weights = train(turn)
    ended, cpu = turn.steps.ended, turn.steps.cpu_seconds
    if len(ended) != turn.count:
        raise RuntimeError(f"{task.system} was to train {turn.count} steps, and reported {len(ended)}")
    wanted = plain_averaging(profile, turn.count, session.world_size)
    sizes = None
    if task.system == "commsched":
        config = session.core.next_config
        sizes = [config.partition_bytes, config.credit_bytes]
    return {
        "seconds": [end - begin for begin, end in pairwise(ended)][settle - 1 :],
        "cpu_seconds": (cpu[-1] - cpu[settle - 1]) / task.steps,
        "max_difference": None if weights is None else difference(weights, wanted),
        "network": asdict(network),
        "sizes": sizes,
    }
