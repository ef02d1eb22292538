"""Runs a simulation: worker classes that compute layer after layer, submit gradients and wait for averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from ..core.task import CommTask
from .clock import VirtualClock
from .collectives import AllReduce, SimulatedReduceScatterAllGather, Split
from .copies import Copies, SimulatedExchange
from .network_sharing import FairShareCache
from .parameter_server import ParameterServers
from .profile import Grouping, Profile
from .scenario import Cluster, Exchange, OnDone, OnNorm, Rules


class Worker:
    """Trains ``steps`` steps. A step lasts from the start of backward to the end of the next forward.

    Args:
        index: index of the worker class.
        profile: the profile with the times of this class.
    """

    def __init__(self, clock: VirtualClock, index: int, profile: Profile, grouping: Grouping, rules: Rules, steps: int) -> None:
        self._clock = clock
        self._index = index
        self._profile = profile
        self._grouping = grouping
        self._rules = rules
        self._steps = steps
        self._layers_of = grouping.layers_of
        self._partitions_of: Sequence[list[int]] = [[] for _ in profile.layers]
        for partition, layers in enumerate(self._layers_of):
            for layer in layers:
                self._partitions_of[layer].append(partition)
        self._step = -1
        self._tasks: list[CommTask] = []
        self._layers_missing: list[int] = []  # by partition: number of layers whose gradients are not written yet
        self._waits_for: list[int] = []  # by layer: number of partitions that are not averaged yet
        self._unfinished = 0  # partitions of this step that are not averaged yet
        self._needs_norm = False  # whether the norm of this step's averages is still to come
        self._held: list[CommTask] = []
        self._in_backward = False
        self._blocked: tuple[int, float] | None = None  # the layer that waits, and since when
        self._began = 0.0
        self.ended: list[float] = []
        #: The last step: track, name, priority, start and stop in seconds from the step's start; for the network also ready.
        self.timeline: list[dict[str, Any]] = []

    def begin(self, exchange: SimulatedExchange) -> None:
        """Begin the first step."""
        self._exchange = exchange
        self._backward()

    def done(self, step: int, partition: int) -> None:
        """Take note that the average of a partition is complete."""
        assert step == self._step
        task = self._tasks[partition]
        task.done_at = self._clock.now
        label = self._grouping.label(partition)
        self._record("network", label, task.started_at, task.done_at, task.priority, ready=task.ready_at - self._began)
        self._unfinished -= 1
        for layer in self._layers_of[partition]:
            self._waits_for[layer] -= 1
        self._continue()

    def normed(self, step: int) -> None:
        """Take note that the norm of all averages is known."""
        assert step == self._step
        self._needs_norm = False
        self._continue()

    def _continue(self) -> None:
        if self._blocked is not None and not self._must_wait(self._blocked[0]):
            layer, since = self._blocked
            self._blocked = None
            self._record("wait", self._profile.layers[layer].name, since, self._clock.now)
            self._compute(layer)

    def _backward(self) -> None:
        self._step += 1
        self._began = self._clock.now
        self.timeline = []
        partitions = self._grouping.plan.partitions
        self._tasks = [CommTask(0, self._step, partition, None) for partition in partitions]
        self._layers_missing = [len(layers) for layers in self._layers_of]
        self._waits_for = [len(partitions) for partitions in self._partitions_of]
        self._unfinished = len(partitions)
        self._needs_norm = self._rules.norm
        self._in_backward = True
        at = self._began
        for layer in reversed(range(len(self._profile.layers))):
            began, at = at, at + self._profile.layers[layer].backward_seconds
            self._record("backward", self._profile.layers[layer].name, began, at)
            self._clock.call_at(at, partial(self._gradients, layer))
        self._clock.call_at(at, self._backward_ended)

    def _gradients(self, layer: int) -> None:
        # Backward writes the front-most tensor of a partition last, so partitions become ready in their own order.
        for partition in self._partitions_of[layer]:
            self._layers_missing[partition] -= 1
            if self._layers_missing[partition] == 0:
                self._ready(self._tasks[partition])

    def _ready(self, task: CommTask) -> None:
        if self._rules.hold and self._in_backward:
            self._held.append(task)
        else:
            self._exchange.ready(self._index, task)

    def _backward_ended(self) -> None:
        self._in_backward = False
        for task in self._held:
            self._exchange.ready(self._index, task)
        self._held.clear()
        self._forward(0)

    def _forward(self, layer: int) -> None:
        if layer == len(self._profile.layers):
            self._end()
        elif self._must_wait(layer):
            self._blocked = layer, self._clock.now
        else:
            self._compute(layer)

    def _must_wait(self, layer: int) -> bool:
        needs_norm = self._needs_norm and bool(self._partitions_of[layer])
        return needs_norm or (self._unfinished if self._rules.barrier else self._waits_for[layer]) > 0

    def _compute(self, layer: int) -> None:
        now, spent = self._clock.now, self._profile.layers[layer].forward_seconds
        self._record("forward", self._profile.layers[layer].name, now, now + spent)
        self._clock.call_at(now + spent, partial(self._forward, layer + 1))

    def _end(self) -> None:
        self.ended.append(self._clock.now)
        if self._step + 1 < self._steps:
            self._backward()

    def _record(self, track: str, name: str, start: float, stop: float, priority: int | None = None, **more: float) -> None:
        span = {"track": track, "name": name, "priority": priority, "start": start - self._began, "stop": stop - self._began}
        self.timeline.append({**span, **more})


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

    With equal workers every step is like the first, or nearly so if a norm is waited for over a parameter server. The
    simulation of a step takes no longer for thousands of workers in one class than for a few.

    Args:
        shares: cache of earlier simulations with the same NICs and the same rules. It makes this simulation faster.

    Raises:
        ValueError: ``steps`` is less than 1.
    """
    if steps < 1:
        raise ValueError(f"a simulation has at least 1 step, not {steps}")
    clock = VirtualClock()
    grouping = Grouping.of(profile, rules, cluster.shards)
    workers = [
        Worker(clock, index, profile.scaled(seconds=each.compute_factor), grouping, rules, steps)
        for index, each in enumerate(cluster.workers)
    ]

    def on_done(worker: int, step: int, partition: int) -> None:
        workers[worker].done(step, partition)

    def on_norm(worker: int, step: int) -> None:
        workers[worker].normed(step)

    partitions = len(grouping.plan.partitions)
    exchange: SimulatedExchange
    if cluster.copy_rate is None:
        exchange = _exchange(clock, cluster, shares, rules, on_done, on_norm, partitions)
    else:
        exchange = copies = Copies(clock, cluster, rules.config, on_done)
        copies.inner = _exchange(clock, cluster, shares, rules, copies.done, on_norm, partitions)
    for worker in workers:
        worker.begin(exchange)
    clock.run()
    unfinished = [index for index, worker in enumerate(workers) if len(worker.ended) < steps]
    if unfinished:
        raise AssertionError(f"worker classes {unfinished} never finished: the rules deadlock")
    ended = [max(times) for times in zip(*(worker.ended for worker in workers))]
    return Outcome(tuple(after - before for before, after in pairwise([0.0, *ended])), tuple(workers[0].timeline), grouping)


def _exchange(
    clock: VirtualClock,
    cluster: Cluster,
    shares: FairShareCache | None,
    rules: Rules,
    on_done: OnDone,
    on_norm: OnNorm,
    partitions: int,
) -> ParameterServers | AllReduce:
    norm = on_norm if rules.norm else None
    if rules.exchange is Exchange.PARAMETER_SERVER:
        nics = shares or FairShareCache(cluster, rules.pushes_first)
        return ParameterServers(clock, cluster, nics, rules.config, on_done, norm, partitions)
    if rules.exchange is Exchange.ALL_REDUCE:
        return AllReduce(clock, cluster, rules.config, on_done)
    if rules.exchange is Exchange.SPLIT:
        return Split(clock, cluster, rules.config, on_done, norm, partitions)
    return SimulatedReduceScatterAllGather(clock, cluster, rules.config, on_done, partitions)
