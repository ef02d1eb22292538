"""Composes a simulation and runs it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .clock import VirtualClock
from .collectives import AllReduce, ReduceScatterAllGather
from .exchange import ExchangeModel, OnDone
from .parameter_server import ParameterServers
from .profile import Profile
from .scenario import Cluster, Exchange, Rules
from .shares import Shares
from .tensors import Grouping
from .worker import Worker


@dataclass(frozen=True)
class Outcome:
    """``step_seconds`` are of each step, until the last worker's end; ``timeline`` is of the first class in the last step.

    An entry of the timeline has ``track`` (forward, backward, network, wait), ``name``, ``priority`` (of the network's; else
    None), ``start`` and ``stop`` in seconds from the step's start, and those of the network ``ready``.
    """

    step_seconds: tuple[float, ...]
    timeline: tuple[dict[str, Any], ...]
    grouping: Grouping


def simulate(profile: Profile, cluster: Cluster, rules: Rules, steps: int = 1, *, shares: Shares | None = None) -> Outcome:
    """Train ``profile`` on ``cluster`` by ``rules``.

    With equal workers every step is like the first. One step of thousands of workers in one class takes no longer than that
    of a few.

    Args:
        shares: of the same NICs under the same rules, from simulations before: what it remembers makes this one faster.

    Raises:
        ValueError: there is less than one step.
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
    clock: VirtualClock, cluster: Cluster, shares: Shares | None, rules: Rules, on_done: OnDone, partitions: int
) -> ExchangeModel:
    if rules.exchange is Exchange.PARAMETER_SERVER:
        return ParameterServers(clock, cluster, shares or Shares(cluster, rules.pushes_first), rules.config, on_done)
    if rules.exchange is Exchange.ALL_REDUCE:
        return AllReduce(clock, cluster, rules.config, on_done)
    return ReduceScatterAllGather(clock, cluster, rules.config, on_done, partitions)
