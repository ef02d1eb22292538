"""How long steps take on this rank: all along, and in the windows that rank 0 asks for. Every rank has one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any

from ..core.errors import CommschedError
from ..core.manifest import Manifest
from ..core.task import CommTask
from .drift import Drift

log = logging.getLogger("commsched")

#: An interval that is so many times the median is not a step's alone: an evaluation or a checkpoint lies in it.
DISTURBED = 2.0

#: Of a window's intervals, so many at most. More are part of what steps are: of a configuration under which single ones are
#: slow, or of training that does something else at every fifth.
MOST_DISTURBED = 0.1

#: A group that has had no step while the others had so many has probably had its last.
_IDLE_STEPS = 500


@dataclass
class _Group:
    manifest: Manifest
    steps: int = 0  # begun
    last_at: float = 0.0  # when the last of them began
    last_place: int = 0  # of that among the steps of all groups
    ended: bool = False

    @property
    def nbytes(self) -> int:
        return sum(self.manifest.buffer_bytes.values())


@dataclass
class WindowUnderWay:
    """From step ``first_step`` of a group on, ``settle`` intervals from one step's beginning to the next are left out, then
    counted until :func:`summary` is content."""

    trial: int
    group: int
    settle: int
    steps: int
    first_step: int
    intervals: list[float] = field(default_factory=list)
    last_at: float = 0.0

    def on_step(self, step: int, at: float) -> dict[str, Any] | None:
        """``step`` began; the report, once there is one."""
        if step < self.first_step:
            return None
        began, self.last_at = self.last_at, at
        if step > self.first_step + self.settle:
            self.intervals.append(at - began)
        found = summary(self.intervals, self.steps)
        return None if found is None else {"trial": self.trial, **found}

    def failed(self, why: str) -> dict[str, Any]:
        return {"trial": self.trial, "failed": why}


def summary(intervals: list[float], steps: int) -> dict[str, Any] | None:
    """What the ``intervals`` of a window say of a step; None: more are wanted, until ``steps`` are undisturbed.

    The median of the undisturbed ones, as long as no more than :data:`MOST_DISTURBED` are not. Else none is left out, and it is
    the mean, in which slow steps count as much as they cost. There is an answer after ``1.12 * steps`` intervals.
    """
    if len(intervals) < steps:
        return None
    most = DISTURBED * median(intervals)
    undisturbed = [interval for interval in intervals if interval <= most]
    rejected = len(intervals) - len(undisturbed)
    if rejected > MOST_DISTURBED * len(intervals):
        error = stdev(intervals) / len(intervals) ** 0.5
        return {"seconds": fmean(intervals), "error": error, "steps": len(intervals), "rejected": 0}
    if len(undisturbed) < steps:
        return None
    seconds = median(undisturbed)
    return {"seconds": seconds, "error": standard_error(undisturbed, seconds), "steps": len(undisturbed), "rejected": rejected}


def standard_error(values: list[float], middle: float) -> float:
    """Of the median ``middle`` of ``values``: as of normal ones, whose spread is estimated by the median absolute deviation."""
    sigma = 1.4826 * median(abs(value - middle) for value in values)
    return float(1.2533 * sigma / len(values) ** 0.5)


class Meter:
    """Times steps as an observer of the core (``ports.Observer``), and is told of changes as this rank's ``Tuner`` (see
    ``session.py``). It tells rank 0 of each window that is full.

    Args:
        tell: sends a JSON value to rank 0's tuner; called from an engine's thread, without a lock. It may raise
            CommschedError, when the session ends: then nobody is there to be told.
    """

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self._changed = threading.Condition()  # guards all below
        self._groups: dict[int, _Group] = {}
        self._steps = 0  # of all groups
        self._window: WindowUnderWay | None = None
        self._drift: tuple[int, Drift] | None = None
        self._awaited: Callable[[], bool] | None = None  # by rank 0's tuner
        self._closed = False

    def add_group(self, group: int, manifest: Manifest) -> None:
        """There is a group, before its first step. Steps of others, broadcasts say, do not count."""
        with self._changed:
            self._groups[group] = _Group(manifest)

    # --- Tuner ---

    def on_switch(self, window: Mapping[str, Any], steps: Mapping[int, int]) -> None:
        """A window begins: ``trial`` is its number, ``group`` whose steps count; ``settle`` intervals are left out, then
        ``steps`` counted. It replaces one that is not full yet."""
        trial, group, settle, wanted = (int(window[name]) for name in ("trial", "group", "settle", "steps"))
        under_way = WindowUnderWay(trial, group, settle, wanted, first_step=steps.get(group, -1))
        with self._changed:
            gone = under_way.first_step < 0
            self._window = None if gone else under_way
            if gone and group in self._groups:
                self._groups[group].ended = True
        if gone:
            self._report(under_way.failed(f"group {group} has no steps any more"))

    def on_told(self, rank: int, value: Any) -> None:
        """Only rank 0's tuner is told anything."""

    def on_leave(self, rank: int) -> None:
        """Nothing to do: rank 0's tuner ends the trial."""

    def close(self, wait: bool = False) -> None:
        with self._changed:
            self._closed = True
            self._window = None
            self._changed.notify_all()

    # --- ports.Observer ---

    def on_step(self, group: int, step: int, at: float) -> None:
        report = None
        with self._changed:
            known = self._groups.get(group)
            if known is None:
                return
            self._steps += 1
            if self._drift is not None and group == self._drift[0] and known.steps > 0:
                self._drift[1].add(at - known.last_at)
            known.steps += 1
            known.last_at, known.last_place = at, self._steps
            if self._window is not None:
                report = self._measure(self._window, group, step, at)
                if report is not None:
                    self._window = None
            if self._awaited is not None and self._awaited():
                self._changed.notify_all()
        if report is not None:
            self._report(report)

    def _measure(self, window: WindowUnderWay, group: int, step: int, at: float) -> dict[str, Any] | None:
        if group == window.group:
            return window.on_step(step, at)
        if self._main_group() != window.group:
            return window.failed(f"group {window.group} is not the main one any more")
        return None

    def _report(self, report: dict[str, Any]) -> None:
        try:
            self._tell(report)
        except CommschedError as error:
            log.debug("no report of a trial: %s", error)

    def on_ready(self, group: int, tensor: int, at: float) -> None:
        """Steps are what counts here."""

    def on_task(self, task: CommTask) -> None:
        """Steps are what counts here."""

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        """Steps are what counts here."""

    # --- rank 0's tuner ---

    def main_group(self) -> int | None:
        """The group of most bytes of those that are in use; None: training has not begun, or its last group has ended."""
        with self._changed:
            return self._main_group()

    def manifests(self) -> list[Manifest]:
        """Those of all groups, in order."""
        with self._changed:
            return [group.manifest for _, group in sorted(self._groups.items())]

    def wait_until_training(self, steps: int) -> tuple[int, Manifest] | None:
        """The main group and its tensors, when it has begun so many steps; None: closed before."""

        def has_begun() -> bool:
            main = self._main_group()
            return main is not None and self._groups[main].steps >= steps

        with self._changed:
            self._wait_until(has_begun)
            main = self._main_group()
            return None if self._closed or main is None else (main, self._groups[main].manifest)

    def wait_for_steps(self, group: int, steps: int) -> bool:
        """Return when ``group`` has begun so many more steps. False: closed before, or another is the main group."""
        with self._changed:
            known = self._groups[group]
            last = known.steps + steps
            self._wait_until(lambda: known.steps >= last or self._is_another(group))
            return known.steps >= last

    def wait_for_change(self, group: int, drift: Drift | None) -> bool:
        """Tell ``drift`` of each step of ``group``; return when it is found, or another is the main group. False: closed
        before."""
        with self._changed:
            self._drift = None if drift is None else (group, drift)
            self._wait_until(lambda: (drift is not None and drift.found) or self._is_another(group))
            self._drift = None
            return not self._closed

    def _is_another(self, group: int) -> bool:
        return self._main_group() not in (group, None)

    def _main_group(self) -> int | None:
        used = {
            index: group.nbytes
            for index, group in self._groups.items()
            if group.steps > 1 and not group.ended and self._steps - group.last_place <= _IDLE_STEPS
        }
        return max(used, key=used.__getitem__) if used else None

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Called with the lock held, by one thread. The engine's thread wakes it only when there is something to wake for."""
        self._awaited = condition
        self._changed.wait_for(lambda: condition() or self._closed)
        self._awaited = None
