"""Step times of this rank, measured all the time and in the windows that rank 0 requests. Every rank has a meter."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any

from ..core.errors import CommschedError
from ..core.manifest import Manifest
from .stats import DriftDetector

log = logging.getLogger("commsched")

#: An interval longer than this multiple of the median is disturbed: it holds more than a step, such as an evaluation or a
#: checkpoint.
DISTURBED = 2.0

#: Largest share of a window's intervals to leave out as disturbed. A greater share is normal for these steps: the
#: configuration makes single steps slow, or training does something else at every fifth step.
MAX_DISTURBED = 0.1

#: A window has at most so many times the intervals that count: 1 / (1 - MAX_DISTURBED), and one more interval.
LONGEST_WINDOW = 1.12

#: A group without a step during this many steps of the others has probably ended.
_IDLE_STEPS = 500


@dataclass
class _Group:
    manifest: Manifest
    steps: int = 0  # that have begun
    last_at: float = 0.0  # time at which the last step began
    last_place: int = 0  # number of the last step among the steps of all groups
    ended: bool = False

    @property
    def nbytes(self) -> int:
        return sum(self.manifest.buffer_bytes.values())


@dataclass
class WindowUnderWay:
    """A window from step ``first_step`` of a group on. An interval lasts from the beginning of one step to the beginning of the
    next. The first ``settle`` intervals are left out; then intervals are counted until :func:`summary` has a result."""

    trial: int
    group: int
    settle: int
    steps: int
    first_step: int
    intervals: list[float] = field(default_factory=list)
    last_at: float = 0.0

    def on_step(self, step: int, at: float) -> dict[str, Any] | None:
        """Record the beginning of ``step``. Returns the report when the window is full; otherwise None."""
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
    """The step time from the ``intervals`` of a window; None if more intervals are needed.

    The step time is the median of the undisturbed intervals, if the share of disturbed ones is at most :data:`MAX_DISTURBED`;
    this takes ``steps`` undisturbed intervals. Otherwise no interval is left out and the step time is the mean, in which slow
    steps count with their full cost. There is a result after :data:`LONGEST_WINDOW` times ``steps`` intervals at the latest.
    """
    if len(intervals) < steps:
        return None
    most = DISTURBED * median(intervals)
    undisturbed = [interval for interval in intervals if interval <= most]
    rejected = len(intervals) - len(undisturbed)
    if rejected > MAX_DISTURBED * len(intervals):
        error = stdev(intervals) / len(intervals) ** 0.5
        return {"seconds": fmean(intervals), "error": error, "steps": len(intervals), "rejected": 0}
    if len(undisturbed) < steps:
        return None
    seconds = median(undisturbed)
    return {"seconds": seconds, "error": standard_error(undisturbed, seconds), "steps": len(undisturbed), "rejected": rejected}


def standard_error(values: list[float], middle: float) -> float:
    """Standard error of the median ``middle`` of ``values``, for a normal distribution. The median absolute deviation estimates
    its spread."""
    sigma = 1.4826 * median(abs(value - middle) for value in values)
    return float(1.2533 * sigma / len(values) ** 0.5)


class StepTimer:
    """Times steps by a callback of the core. It is also this rank's tuner (``session.events.Tuner``), which the session
    notifies of changes. It reports each full window to rank 0.

    Args:
        tell: sends a JSON value to rank 0's tuner. It is called from an engine's thread, without a lock. It may raise
            CommschedError when the session ends; the report is then dropped.
        is_over: returns whether a group was released. Any thread may call it.
    """

    def __init__(self, tell: Callable[[Any], None], is_over: Callable[[int], bool] = lambda group: False) -> None:
        self._tell = tell
        self._is_over = is_over
        self._changed = threading.Condition()  # guards all below
        self._groups: dict[int, _Group] = {}
        self._steps = 0  # of all groups
        self._window: WindowUnderWay | None = None
        self._drift: tuple[int, DriftDetector] | None = None
        self._awaited: Callable[[], bool] | None = None  # the condition that rank 0's tuner waits for
        self._closed = False

    def add_group(self, group: int, manifest: Manifest) -> None:
        """Register a group before its first step. Steps of unregistered groups, such as broadcasts, do not count."""
        with self._changed:
            self._groups[group] = _Group(manifest)

    # --- Tuner ---

    is_settled = True  # rank 0's tuner knows

    def on_switch(self, window: Mapping[str, Any], steps: Mapping[int, int]) -> None:
        """A window begins. ``trial`` is its number, and ``group`` is the group whose steps count. ``settle`` intervals are left
        out, then ``steps`` intervals are counted. The new window replaces one that is not full yet."""
        trial, group, settle, wanted = (int(window[name]) for name in ("trial", "group", "settle", "steps"))
        under_way = WindowUnderWay(trial, group, settle, wanted, first_step=steps.get(group, -1))
        with self._changed:
            gone = under_way.first_step < 0
            self._window = None if gone else under_way
            if gone and group in self._groups:
                self._groups[group].ended = True
        if gone:
            self._report(under_way.failed(f"group {group} has no steps any more"))

    def on_message(self, rank: int, value: Any) -> None:
        """Does nothing: only rank 0's tuner receives messages."""

    def on_leave(self, rank: int) -> None:
        """Does nothing: rank 0's tuner ends the trial."""

    def close(self, wait: bool = False) -> None:
        with self._changed:
            self._closed = True
            self._window = None
            self._changed.notify_all()

    def on_step(self, group: int, step: int, at: float) -> None:
        """``step`` of ``group`` begins, at that time in seconds. Called from the engine's thread."""
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

    # --- rank 0's tuner ---

    def main_group(self) -> int | None:
        """The largest group in bytes among those in use; None if training has not begun or its last group has ended."""
        with self._changed:
            return self._main_group()

    def manifests(self) -> list[Manifest]:
        """The manifests of all groups, ordered by group number."""
        with self._changed:
            return [group.manifest for _, group in sorted(self._groups.items())]

    def manifest_of(self, group: int) -> Manifest:
        """The tensors of ``group``, which was added."""
        with self._changed:
            return self._groups[group].manifest

    def wait_until_training(self, steps: int) -> tuple[int, Manifest] | None:
        """Wait until the main group has begun ``steps`` steps. Returns the group and its tensors, or None if the meter was
        closed first."""

        def has_begun() -> bool:
            main = self._main_group()
            return main is not None and self._groups[main].steps >= steps

        with self._changed:
            self._wait_until(has_begun)
            main = self._main_group()
            return None if self._closed or main is None else (main, self._groups[main].manifest)

    def wait_for_steps(self, group: int, steps: int) -> bool:
        """Wait until ``group`` has begun ``steps`` more steps. Returns False if the meter was closed first, or another group
        became the main one."""
        with self._changed:
            known = self._groups[group]
            last = known.steps + steps
            self._wait_until(lambda: known.steps >= last or self._is_another(group))
            return known.steps >= last

    def wait_for_change(self, group: int, drift: DriftDetector | None) -> bool:
        """Feed each step time of ``group`` to ``drift``; return when drift is found, or another group is the main one. Returns
        False if the meter was closed first."""
        with self._changed:
            self._drift = None if drift is None else (group, drift)
            self._wait_until(lambda: (drift is not None and drift.found) or self._is_another(group))
            self._drift = None
            return not self._closed

    def _is_another(self, group: int) -> bool:
        return self._main_group() not in (group, None)

    def _main_group(self) -> int | None:
        used = {index: group.nbytes for index, group in self._groups.items() if self._is_in_use(index, group)}
        return max(used, key=used.__getitem__) if used else None

    def _is_in_use(self, index: int, group: _Group) -> bool:
        is_idle = group.ended or self._steps - group.last_place > _IDLE_STEPS
        return group.steps > 1 and not is_idle and not self._is_over(index)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Called with the lock held, by one thread. The engine's thread wakes it only when ``condition`` holds."""
        self._awaited = condition
        self._changed.wait_for(lambda: condition() or self._closed)
        self._awaited = None
