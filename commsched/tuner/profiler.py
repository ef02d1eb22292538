"""Layer times of a model and the rate of its link, measured in a few steps of training."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from ..core.interfaces import Observer
from ..core.manifest import Manifest
from ..core.task import ALL_REDUCE, CommTask
from ..simulator.profile import ITEMSIZE, LayerProfile, Profile

#: Most records of each kind; about 30 MB. Five steps of a thousand tensors in ten thousand partitions need half of that.
_MAX_RECORDS = 100_000

#: A busy period of this many tasks or more shows the rate of the link. A single task does not, because it waits for itself.
_BUSY_TASKS = 4

#: Another group shares the network if it has at least this share of the bytes of the profiled one.
_SHARES_FROM = 0.01

#: Bounds of a guess of the overhead of a partition, in seconds: for the parameter server, and for collectives in an agreed
#: order, from measurements. ``_MAX_OVERHEAD`` is the largest share of the link's time.
_PARTITION_SECONDS = (50e-6, 100e-6)
_COLLECTIVE_PARTITION_SECONDS = (150e-6, 400e-6)
_MAX_OVERHEAD = 0.8

#: Relative standard deviation of the time for which collectives keep the network busy, from one profile to the next.
_BUSY_DEVIATION = 0.003

#: Bound of the overhead of a collective whose bytes are known to travel fast: a thread of CPython waits for so long before it
#: asks for the interpreter's lock.
_LOCK_SECONDS = 5e-3


@dataclass(frozen=True)
class LinkEstimate:
    """The time that averaging takes on the slowest link, as this job uses it.

    Args:
        seconds_per_byte: seconds per byte of gradient, from a rank's memory until the average is written, when many partitions
            follow each other.
        partition_seconds: additional time for which each partition occupies the link.
        latency_seconds: time from when a message of the parameter server has left its sender until the receiver can use it,
            while other messages use the link. Most of it is the queue in the network that TCP fills.
    """

    seconds_per_byte: float
    partition_seconds: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        times = self.seconds_per_byte, self.partition_seconds, self.latency_seconds
        if not (all(map(math.isfinite, times)) and self.seconds_per_byte > 0 and min(times) >= 0):
            raise ValueError(f"not the times of a link: {self}")


@dataclass(frozen=True, slots=True)
class Busy:
    """Collectives that followed each other without a pause took ``seconds`` in all, for ``nbytes`` bytes of gradient in
    ``partitions`` partitions."""

    seconds: float
    nbytes: float
    partitions: int


def fitted_link(guess: LinkEstimate, seen: Sequence[Busy]) -> LinkEstimate:
    """The link of collectives whose bytes and partitions took the times in ``seen``, as nearly as can be.

    The overhead of a partition is known only if sizes differed: then it is what more partitions took for the same bytes. A
    guess that is off by a factor of e counts as much as times that are off by 0.3 %.
    """
    factors = np.exp(np.linspace(-4.0, 4.0, 161))
    seconds, nbytes, partitions = (np.array(values, float) for values in zip(*map(astuple, seen)))
    overheads = guess.partition_seconds * factors
    per_byte = ((seconds - np.outer(overheads, partitions)) / nbytes).mean(axis=1)
    off = (np.outer(per_byte, nbytes) + np.outer(overheads, partitions)) / seconds - 1
    cost = np.where(per_byte > 0, (off**2).sum(axis=1) / _BUSY_DEVIATION**2 + np.log(factors) ** 2, np.inf)
    best = int(cost.argmin())
    if not math.isfinite(cost[best]):
        return guess
    return LinkEstimate(float(per_byte[best]), float(overheads[best]), guess.latency_seconds)


@dataclass(frozen=True)
class Measured:
    """The result of a profile. ``samples`` are the seconds of each step with the configuration in use;
    of several profiles of one configuration the last one has those of all.

    ``waited_seconds`` has the median time per step for which the engine waited for a tensor's average, by the tensor's name.

    ``transfer_seconds_per_byte`` is the time that a byte of gradient takes on the network without the latency at the end of
    each busy period; None means the same as ``link``.
    ``sending_seconds_per_byte`` is the time for which this rank's contribution of a byte of gradient occupies its own link,
    over a parameter server; None if it was not seen. Unlike the time until the average is there, it does not depend on other
    ranks.
    ``is_assumed``: the rate of the network is the least that is known of it, because what was seen is slower.
    ``busy`` is what collectives took; None over a parameter server, where replies also wait for ranks that are late, and if
    ``is_assumed``.
    ``is_shared``: other groups used the network in these steps, too. ``link`` and the other rates take that into account. Waits
    do not, if tensors of two groups have one name, and so the forward's times of layers do not.
    """

    profile: Profile
    link: LinkEstimate
    samples: tuple[float, ...]
    waited_seconds: Mapping[str, float] = field(default_factory=dict)
    transfer_seconds_per_byte: float | None = None
    sending_seconds_per_byte: float | None = None
    is_assumed: bool = False
    busy: Busy | None = None
    is_shared: bool = False

    @property
    def step_seconds(self) -> float:
        return median(self.samples)


class _Task(NamedTuple):
    nbytes: float
    started_at: float
    sent_at: float
    done_at: float


class _Wait(NamedTuple):
    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class _Step:
    """One step. Times count from its beginning. ``ready[t]`` is the time at which the gradient of tensor ``t`` was ready."""

    seconds: float
    ready: tuple[float, ...]
    waits: tuple[_Wait, ...]

    @property
    def backward_seconds(self) -> float:
        return self.ready[0]


class Profiler(Observer):
    """An observer of the first ``steps`` steps of one group that begin after the profiler was made. Any thread may call it.
    ``counts`` says of another group whether its averages use the network as those of ``group`` do: the few bytes that plugins
    send for themselves do not count.

    ``full`` is set when these steps have ended, or by :meth:`stop`. After that nothing is recorded, except tasks that were
    still running when the last step ended.
    """

    def __init__(self, group: int, steps: int = 5, counts: Callable[[int], bool] = lambda group: False) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps}: at least 1")
        self.full = threading.Event()
        self._group = group
        self._counts = counts
        self._most_steps = steps
        self._stopped = False
        self._began: list[tuple[int, float]] = []  # step, at
        self._ready: list[tuple[int, float]] = []  # tensor, at
        self._tasks: list[tuple[int, int, _Task]] = []  # group, step, task
        self._waits: list[_Wait] = []

    def stop(self) -> None:
        """Ignore all further events. :meth:`result` still works."""
        self._stopped = True
        self.full.set()

    # --- Observer ---

    def on_step(self, group: int, step: int, at: float) -> None:
        if group == self._group and not self.full.is_set():
            self._began.append((step, at))
            if len(self._began) > self._most_steps:
                self.full.set()

    def on_ready(self, group: int, tensor: int, at: float) -> None:
        if group == self._group and self._began and not self.full.is_set() and len(self._ready) < _MAX_RECORDS:
            self._ready.append((tensor, at))

    def on_task(self, task: CommTask) -> None:
        if not self._began or self._stopped or len(self._tasks) >= _MAX_RECORDS:
            return
        if task.group == self._group or self._counts(task.group):
            # A reduce-scatter and an all-gather are half an all-reduce each.
            nbytes = task.nbytes if task.verb == ALL_REDUCE else task.nbytes / 2
            self._tasks.append((task.group, task.step, _Task(nbytes, task.started_at, task.sent_at, task.done_at)))

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        if track == "wait" and self._began and not self.full.is_set() and len(self._waits) < _MAX_RECORDS:
            self._waits.append(_Wait(name, start, stop))

    # ---

    def result(self, manifest: Manifest, *, ordered: bool = False, most_seconds_per_byte: float = math.inf) -> Measured | None:
        """Layer and link times from the steps that have ended. ``manifest`` is the group's manifest. Returns None if no
        complete step has ended or nothing was sent.

        Each tensor is a layer, and times are medians over steps. A step lasts from the first gradient of one backward to the
        first gradient of the next, because ``begin_step`` is called there. Times follow this: the last layer's backward counts
        at the end of forward.

        backward: the time from one tensor's gradient to the gradient of the tensor before it.

        forward: the time between the end of one wait for an average and the beginning of the next belongs to the tensors that
        are read in between. Among tensors without a wait it is split by their backward times, or by bytes if these are zero.
        (The last tensor's backward time counts as at least the mean, because its gradient begins the step.) The time before the
        first tensor's wait belongs to an extra layer that waits for nothing. An engine that reads all parameters before it
        computes is represented correctly: all of forward comes after the last average.

        link: the bytes divided by the time in which some task of any group was running. This rate is too low if partitions are
        few and large, or, over a parameter server, if other ranks are late; :meth:`Model.calibrate` corrects it with the
        measured step time. The overhead of a partition cannot be measured with one configuration. It is a guess within known
        bounds, which are higher for ``ordered`` transports; :func:`fitted_link` corrects it there, as soon as other sizes were
        measured. The latency is half of what the quickest quarter of tasks takes from the end of the push to the average,
        without the bytes of the reply: most tasks also wait for other ranks or behind other replies. A collective has no such
        messages, so its latency counts as 0.
        """
        steps = self._complete_steps(manifest)
        tasks, is_shared = self._tasks_of(list(self._began))
        link = self._link(tasks, ordered, most_seconds_per_byte)
        if not steps or link is None:
            return None
        is_assumed = link.seconds_per_byte == most_seconds_per_byte
        return Measured(
            _profile(steps, manifest),
            link,
            tuple(step.seconds for step in steps),
            _waited(steps),
            None if ordered else min(_transfer(tasks), most_seconds_per_byte),
            None if ordered else _sending(tasks),
            is_assumed,
            _busy(tasks)[0] if ordered and not is_assumed else None,
            is_shared,
        )

    def layers(self, manifest: Manifest) -> Profile | None:
        """Only the layer times of :meth:`result`, for which nothing need be sent. None if no complete step has ended."""
        steps = self._complete_steps(manifest)
        return _profile(steps, manifest) if steps else None

    def _complete_steps(self, manifest: Manifest) -> list[_Step]:
        return [step for step in self._steps(manifest, list(self._began)) if step is not None]

    def _steps(self, manifest: Manifest, began: Sequence[tuple[int, float]]) -> Iterator[_Step | None]:
        """Yield each step; None for a step in which a gradient was not seen."""
        waits, ready = list(self._waits), list(self._ready)
        for (_, start), (_, stop) in pairwise(began):
            seen = {tensor: at - start for tensor, at in ready if start <= at < stop}
            if len(seen) < len(manifest.tensors):
                yield None
                continue
            # An earlier layer's gradient may come first (tied or unused parameters). It counts only once the gradients of all
            # later layers are ready.
            at_last = list(accumulate((seen[tensor] for tensor in reversed(range(len(manifest.tensors)))), max))[::-1]
            own = sorted((w for w in waits if start <= w.start < stop), key=lambda w: w.start)
            shifted = (_Wait(w.name, w.start - start, min(w.stop, stop) - start) for w in own)
            yield _Step(stop - start, tuple(at_last), tuple(shifted))

    def _tasks_of(self, began: Sequence[tuple[int, float]]) -> tuple[list[_Task], bool]:
        """The tasks of the steps that have ended, and those of other groups meanwhile; and whether there are any of these."""
        if not began:
            return [], False
        whole, start, stop = {step for step, _ in began[:-1]}, began[0][1], began[-1][1]
        by_group: defaultdict[int, list[_Task]] = defaultdict(list)
        for group, step, task in list(self._tasks):
            if task.done_at > task.started_at and (step in whole if group == self._group else start <= task.started_at < stop):
                by_group[group].append(task)
        if not by_group[self._group]:
            return [], False
        least = _SHARES_FROM * _nbytes(by_group[self._group])
        counted = [tasks for group, tasks in by_group.items() if group == self._group or _nbytes(tasks) >= least]
        return [task for tasks in counted for task in tasks], len(counted) > 1

    def _link(self, tasks: Sequence[_Task], ordered: bool, most_seconds_per_byte: float) -> LinkEstimate | None:
        bounds = _COLLECTIVE_PARTITION_SECONDS if ordered else _PARTITION_SECONDS
        busy, _ = _busy(tasks)
        if busy.nbytes == 0:
            return None
        # The guess is the time of the quickest task beyond that of its bytes, because that task waited for others least.
        per_byte = busy.seconds / busy.nbytes
        quickest = min(task.done_at - task.started_at - per_byte * task.nbytes for task in tasks)
        overhead = min(max(quickest, bounds[0]), bounds[1], _MAX_OVERHEAD * busy.seconds / busy.partitions)
        latency = 0.0 if ordered else _latency(tasks, per_byte)
        per_byte = (busy.seconds - overhead * busy.partitions) / busy.nbytes
        if per_byte > most_seconds_per_byte:
            per_byte = most_seconds_per_byte
            if ordered:  # over a parameter server most of the rest is time for which other ranks were late
                overhead = min((busy.seconds - per_byte * busy.nbytes) / busy.partitions, _LOCK_SECONDS)
        return LinkEstimate(per_byte, overhead, latency)


def _nbytes(tasks: Sequence[_Task]) -> float:
    return sum(task.nbytes for task in tasks)


def _busy(tasks: Sequence[_Task]) -> tuple[Busy, int]:
    """The busy periods of ``tasks`` that show the rate of the link, and their number."""
    periods = _busy_periods(tasks)
    periods = [period for period in periods if len(period) >= _BUSY_TASKS] or periods
    seconds = sum(max(task.done_at for task in period) - period[0].started_at for period in periods)
    nbytes = sum(map(_nbytes, periods))
    return Busy(seconds, nbytes, sum(map(len, periods))), len(periods)


def _latency(tasks: Sequence[_Task], seconds_per_byte: float) -> float:
    beyond = sorted(task.done_at - task.sent_at - seconds_per_byte * task.nbytes for task in tasks)
    return max(0.0, beyond[len(beyond) // 4] / 2)


def _transfer(tasks: Sequence[_Task]) -> float:
    """Seconds per byte of busy periods over a parameter server. Each period lasts for the time of its bytes and one latency."""
    busy, periods = _busy(tasks)
    latency = _latency(tasks, busy.seconds / busy.nbytes)
    return max(busy.seconds - latency * periods, busy.seconds / 2) / busy.nbytes


def _sending(tasks: Sequence[_Task]) -> float | None:
    """Seconds per byte in which this rank's contributions leave, while several follow each other immediately. The first task of
    such a period only fills the queues on the way. None if there is no such period."""
    nbytes = seconds = 0.0
    for period in _busy_periods([task._replace(done_at=task.sent_at) for task in tasks]):
        if len(period) >= _BUSY_TASKS:
            first, *rest = sorted(period, key=lambda task: task.sent_at)
            nbytes += sum(task.nbytes for task in rest)
            seconds += rest[-1].sent_at - first.sent_at
    return seconds / nbytes if nbytes > 0 and seconds > 0 else None


def _waited(steps: Sequence[_Step]) -> dict[str, float]:
    """The median time per step of the waits for each tensor that was waited for."""
    totals: list[defaultdict[str, float]] = [defaultdict(float) for _ in steps]
    for total, step in zip(totals, steps):
        for wait in step.waits:
            total[wait.name] += wait.stop - wait.start
    names = {name for total in totals for name in total}
    return {name: median(total[name] for total in totals) for name in names}


def _busy_periods(tasks: Sequence[_Task]) -> list[list[_Task]]:
    """Groups of tasks that overlap or follow each other immediately, in order of start."""
    periods: list[list[_Task]] = []
    until = -math.inf
    for task in sorted(tasks, key=lambda task: task.started_at):
        if task.started_at > until:
            periods.append([])
        periods[-1].append(task)
        until = max(until, task.done_at)
    return periods


def _profile(steps: Sequence[_Step], manifest: Manifest) -> Profile:
    """The layers and their times; see :meth:`Profiler.result`."""
    backward = [median(times) for times in zip(*(_backward(step.ready) for step in steps))]
    weights = [*backward[:-1], max(backward[-1], sum(backward) / len(backward))]
    shares = [_forward(step, manifest, weights) for step in steps]
    forward = [median(times) for times in zip(*shares)]
    # Medians of parts do not add up to the median of the whole.
    total = median(sum(each) for each in shares)
    scale = total / sum(forward) if sum(forward) > 0 else 0.0
    layers = [LayerProfile("before forward", (), scale * forward[0], 0.0)]
    for spec, f, b in zip(manifest.tensors, forward[1:], backward):
        shapes = ((max(1, round(spec.nbytes / ITEMSIZE)),),) if spec.nbytes else ()
        layers.append(LayerProfile(spec.name, shapes, scale * f, b))
    return Profile("training", tuple(layers), "measured")


def _backward(ready: Sequence[float]) -> list[float]:
    """Backward seconds of each tensor, from the times at which gradients were ready."""
    return [now - before for now, before in zip(ready, [*ready[1:], 0.0])]


def _forward(step: _Step, manifest: Manifest, weights: Sequence[float]) -> list[float]:
    """Forward seconds before the first tensor, then of each tensor. ``weights`` divide a time among tensors."""
    places = {spec.name: place for place, spec in enumerate(manifest.tensors)}
    seconds = [0.0] * (1 + len(places))
    read = -1  # the last tensor that was waited for
    at = step.backward_seconds
    passed = 0.0  # computing time since then
    for wait in step.waits:
        passed += max(0.0, wait.start - at)
        at = max(at, wait.stop)
        place = places.get(wait.name, -1)  # other waits, such as for flags, belong to no tensor
        if place > read:
            _split(passed, seconds, read, place, manifest, weights)
            read, passed = place, 0.0
    _split(passed + max(0.0, step.seconds - at), seconds, read, len(places), manifest, weights)
    return seconds


def _split(passed: float, seconds: list[float], first: int, stop: int, manifest: Manifest, weights: Sequence[float]) -> None:
    """Divide ``passed`` among the tensors from ``first`` to before ``stop``. ``first`` is ``-1`` if no tensor was read yet;
    with ``stop`` 0, the time belongs to the part before all tensors."""
    if stop == 0:
        seconds[0] += passed
        return
    tensors = range(max(first, 0), stop)
    parts: list[float] = [weights[tensor] for tensor in tensors]
    if sum(parts) == 0:
        parts = [manifest.tensors[tensor].nbytes or 1 for tensor in tensors]
    for tensor, part in zip(tensors, parts):
        seconds[1 + tensor] += passed * part / sum(parts)
