"""Sets up a simulation and runs it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .clock import VirtualClock
from .collectives import AllReduce, SimulatedReduceScatterAllGather
from .network_sharing import FairShareCache
from .parameter_server import ParameterServers
from .profile import Profile
from .scenario import Cluster, Exchange, ExchangeModel, OnDone, Rules
from .tensors import Grouping
from .worker import Worker


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation.

    ``step_seconds`` holds the duration of each step, until the last worker has ended it. ``timeline`` shows the last step of
    the first worker class. Each entry has ``track`` (forward, backward, network, wait), ``name``, ``priority`` (``None`` unless
    the track is network), and ``start`` and ``stop`` in seconds from the step's start. Entries of the network also have
    ``ready``.
    """

    step_seconds: tuple[float, ...]
    timeline: tuple[dict[str, Any], ...]
    grouping: Grouping


def simulate(
    profile: Profile, cluster: Cluster, rules: Rules, steps: int = 1, *, shares: FairShareCache | None = None
) -> Outcome:
    """Simulate the training of ``profile`` on ``cluster`` under ``rules``.

    With equal workers every step is like the first. The simulation of a step takes no longer for thousands of workers in one
    class than for a few.

    Args:
        shares: cache of earlier simulations with the same NICs and the same rules. It makes this simulation faster.

    Raises:
        ValueError: ``steps`` is less than 1.
    """
    if steps < 1:
        raise ValueError(f"a simulation has at least 1 step, not {steps}")
    clock = VirtualClock()
    grouping = Grouping.of(profile, rules)
    workers = [
        Worker(clock, index, profile.scaled(seconds=each.compute_factor), grouping, rules, steps)
        for index, each in enumerate(cluster.workers)
    ]

    def on_done(worker: int, step: int, partition: int) -> None:
        workers[worker].done(step, partition)

    exchange = _exchange(clock, cluster, shares, rules, on_done, len(grouping.plan.partitions))
    for worker in workers:
        worker.begin(exchange)
    clock.run()
    unfinished = [index for index, worker in enumerate(workers) if len(worker.ended) < steps]
    if unfinished:
        raise AssertionError(f"worker classes {unfinished} never finished: the rules deadlock")
    ended = [max(times) for times in zip(*(worker.ended for worker in workers))]
    return Outcome(tuple(after - before for before, after in pairwise([0.0, *ended])), tuple(workers[0].timeline), grouping)


def _exchange(
    clock: VirtualClock, cluster: Cluster, shares: FairShareCache | None, rules: Rules, on_done: OnDone, partitions: int
) -> ExchangeModel:
    if rules.exchange is Exchange.PARAMETER_SERVER:
        return ParameterServers(clock, cluster, shares or FairShareCache(cluster, rules.pushes_first), rules.config, on_done)
    if rules.exchange is Exchange.ALL_REDUCE:
        return AllReduce(clock, cluster, rules.config, on_done)
    return SimulatedReduceScatterAllGather(clock, cluster, rules.config, on_done, partitions)
