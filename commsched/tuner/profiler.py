"""What a few steps of training tell of a model and its network: layer times, and what the link carries."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

from ..core.manifest import Manifest
from ..core.task import ALL_REDUCE, CommTask
from ..simulator.profile import ITEMSIZE, Layer, Profile

#: Of whatever is recorded; some 30 MB. Five steps of a thousand tensors in ten thousand partitions have half of it.
_MOST_RECORDS = 100_000

#: A time in which so many tasks were averaged without a pause tells what the link carries; a single task waits for itself.
_BUSY_TASKS = 4

#: What a partition costs besides its bytes: bounds of a guess, by what was measured of the parameter server, and of collectives
#: in an order that ranks agree on. And how much of the link's time at most.
_PARTITION_SECONDS = (20e-6, 100e-6)
_COLLECTIVE_PARTITION_SECONDS = (500e-6, 1e-3)
_MOST_OVERHEAD = 0.8


@dataclass(frozen=True)
class Link:
    """What averaging takes of the slowest link, as this job uses it.

    Args:
        seconds_per_byte: of gradient, from a rank's memory to the average in place, when many follow each other.
        partition_seconds: what each partition holds the link besides.
    """

    seconds_per_byte: float
    partition_seconds: float

    def __post_init__(self) -> None:
        times = self.seconds_per_byte, self.partition_seconds
        if not (all(map(math.isfinite, times)) and self.seconds_per_byte > 0 and self.partition_seconds >= 0):
            raise ValueError(f"not the times of a link: {self}")


@dataclass(frozen=True)
class Measured:
    """``step_seconds`` is the median of ``steps``, with the configuration that was in use."""

    profile: Profile
    link: Link
    step_seconds: float
    steps: int


class _Task(NamedTuple):
    nbytes: float
    started_at: float
    done_at: float


class _Wait(NamedTuple):
    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class _Step:
    """One step, times from its beginning. ``ready[t]`` is when the gradient of tensor ``t`` was there."""

    seconds: float
    ready: tuple[float, ...]
    waits: tuple[_Wait, ...]

    @property
    def backward_seconds(self) -> float:
        return self.ready[0]


class Profiler:
    """An observer of the first ``steps`` steps of one group that begin after it was made. Any thread may call it.

    ``full`` is set when they have ended, or by :meth:`stop`. From then on nothing is recorded, but for tasks that were still on
    their way when it became full.
    """

    def __init__(self, group: int, steps: int = 5) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps}: at least 1")
        self.full = threading.Event()
        self._group = group
        self._most_steps = steps
        self._stopped = False
        self._began: list[tuple[int, float]] = []  # step, at
        self._ready: list[tuple[int, float]] = []  # tensor, at
        self._tasks: list[tuple[int, _Task]] = []
        self._waits: list[_Wait] = []

    def stop(self) -> None:
        """Ignore everything from now on; :meth:`result` is still there."""
        self._stopped = True
        self.full.set()

    # --- Observer ---

    def on_step(self, group: int, step: int, at: float) -> None:
        if group == self._group and not self.full.is_set():
            self._began.append((step, at))
            if len(self._began) > self._most_steps:
                self.full.set()

    def on_ready(self, group: int, tensor: int, at: float) -> None:
        if group == self._group and self._began and not self.full.is_set() and len(self._ready) < _MOST_RECORDS:
            self._ready.append((tensor, at))

    def on_task(self, task: CommTask) -> None:
        if task.group == self._group and self._began and not self._stopped and len(self._tasks) < _MOST_RECORDS:
            # A reduce-scatter and an all-gather are half an all-reduce each.
            nbytes = task.nbytes if task.verb == ALL_REDUCE else task.nbytes / 2
            self._tasks.append((task.step, _Task(nbytes, task.started_at, task.done_at)))

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        if track == "wait" and self._began and not self.full.is_set() and len(self._waits) < _MOST_RECORDS:
            self._waits.append(_Wait(name, start, stop))

    # ---

    def result(self, manifest: Manifest, *, collective: bool = False) -> Measured | None:
        """What the steps that have ended say of ``manifest``, the group's; None: there is none, or nothing was sent in them.

        Each tensor is a layer, and times are medians over steps. A step goes from the first gradient of a backward to that of
        the next, as ``begin_step`` is called, and so do these times: the last layer's backward counts at the end of forward.

        backward: from when one tensor's gradient is there to when that of the tensor before it is.

        forward: what passes between the end of one wait for an average and the beginning of the next belongs to the tensors
        that are read in between; where one did not wait, it is split by their backward times, or bytes without those. (The last
        tensor's is taken for the mean at least: its gradient begins the step.)
        What passes before the first tensor waits belongs to a layer of its own, which waits for nothing. An engine that reads
        all parameters before it computes is seen as what it is: all of forward after the last average.

        link: bytes over the times in which something was on its way, which is too slow where partitions are few and large, or
        other ranks late; :meth:`Model.calibrate` with the step's own time corrects it. Of what a partition costs by itself one
        configuration says little: it is a guess within known bounds, which are higher for ``collective`` transports.
        """
        began = list(self._began)
        steps = [step for step in self._steps(manifest, began) if step is not None]
        link = self._link({step for step, _ in began[:-1]}, _COLLECTIVE_PARTITION_SECONDS if collective else _PARTITION_SECONDS)
        if not steps or link is None:
            return None
        backward = [median(times) for times in zip(*(_backward(step.ready) for step in steps))]
        weights = [*backward[:-1], max(backward[-1], sum(backward) / len(backward))]
        shares = [_forward(step, manifest, weights) for step in steps]
        forward = [median(times) for times in zip(*shares)]
        # Medians of parts do not add up to the median of the whole.
        total = median(sum(each) for each in shares)
        scale = total / sum(forward) if sum(forward) > 0 else 0.0
        layers = [Layer("before forward", (), scale * forward[0], 0.0)]
        for spec, f, b in zip(manifest.tensors, forward[1:], backward):
            shapes = ((max(1, round(spec.nbytes / ITEMSIZE)),),) if spec.nbytes else ()
            layers.append(Layer(spec.name, shapes, scale * f, b))
        return Measured(
            Profile("training", tuple(layers), "measured"), link, median(step.seconds for step in steps), len(steps)
        )

    def _steps(self, manifest: Manifest, began: Sequence[tuple[int, float]]) -> Iterator[_Step | None]:
        """None: one of which not every gradient was seen."""
        waits, ready = list(self._waits), list(self._ready)
        for (_, start), (_, stop) in pairwise(began):
            seen = {tensor: at - start for tensor, at in ready if start <= at < stop}
            if len(seen) < len(manifest.tensors):
                yield None
                continue
            # An earlier layer's gradient may come first (tied or unused parameters); it is of no use before those behind it.
            at_last = list(accumulate((seen[tensor] for tensor in reversed(range(len(manifest.tensors)))), max))[::-1]
            own = sorted((w for w in waits if start <= w.start < stop), key=lambda w: w.start)
            shifted = (_Wait(w.name, w.start - start, min(w.stop, stop) - start) for w in own)
            yield _Step(stop - start, tuple(at_last), tuple(shifted))

    def _link(self, steps: set[int], bounds: tuple[float, float]) -> Link | None:
        tasks = [task for step, task in list(self._tasks) if step in steps and task.done_at > task.started_at]
        periods = _busy_periods(tasks)
        long = [period for period in periods if len(period) >= _BUSY_TASKS] or periods
        nbytes = sum(task.nbytes for period in long for task in period)
        if nbytes == 0:
            return None
        busy = sum(max(task.done_at for task in period) - period[0].started_at for period in long)
        count = sum(map(len, long))
        # A guess: what the quickest task took more than its bytes would take, since it waited for others least.
        per_byte = busy / nbytes
        quickest = min(task.done_at - task.started_at - per_byte * task.nbytes for task in tasks)
        overhead = min(max(quickest, bounds[0]), bounds[1], _MOST_OVERHEAD * busy / count)
        return Link((busy - overhead * count) / nbytes, overhead)


def _busy_periods(tasks: Sequence[_Task]) -> list[list[_Task]]:
    """Tasks that overlap or follow each other at once, in order of start."""
    periods: list[list[_Task]] = []
    until = -math.inf
    for task in sorted(tasks, key=lambda task: task.started_at):
        if task.started_at > until:
            periods.append([])
        periods[-1].append(task)
        until = max(until, task.done_at)
    return periods


def _backward(ready: Sequence[float]) -> list[float]:
    """Seconds of each tensor, by when each was ready."""
    return [now - before for now, before in zip(ready, [*ready[1:], 0.0])]


def _forward(step: _Step, manifest: Manifest, weights: Sequence[float]) -> list[float]:
    """Seconds of what comes before the first tensor, then of each tensor; ``weights`` say how tensors share."""
    places = {spec.name: place for place, spec in enumerate(manifest.tensors)}
    seconds = [0.0] * (1 + len(places))
    read = -1  # the last tensor that was waited for
    at = step.backward_seconds
    passed = 0.0  # since it was there
    for wait in step.waits:
        passed += max(0.0, wait.start - at)
        at = max(at, wait.stop)
        place = places.get(wait.name, -1)  # others, of flags say, are waits too, but no tensor's
        if place > read:
            _split(passed, seconds, read, place, manifest, weights)
            read, passed = place, 0.0
    _split(passed + max(0.0, step.seconds - at), seconds, read, len(places), manifest, weights)
    return seconds


def _split(passed: float, seconds: list[float], first: int, stop: int, manifest: Manifest, weights: Sequence[float]) -> None:
    """Add ``passed`` to tensors from ``first`` on, ``-1`` being what comes before them all, and before ``stop``."""
    if stop == 0:
        seconds[0] += passed
        return
    tensors = range(max(first, 0), stop)
    parts: list[float] = [weights[tensor] for tensor in tensors]
    if sum(parts) == 0:
        parts = [manifest.tensors[tensor].nbytes or 1 for tensor in tensors]
    for tensor, part in zip(tensors, parts):
        seconds[1 + tensor] += passed * part / sum(parts)
