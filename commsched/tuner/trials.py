"""Trials of configurations: the windows that they measure, and the trials that rank 0 runs while training goes on."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..core.errors import CommschedError, UnsupportedError
from ..core.order.static import FREEZE_STEPS
from ..core.scheduler import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive training steps with one configuration, as the slowest rank measured them.

    ``seconds`` is the median of the undisturbed steps, or the mean of all steps if many are disturbed (``meter.summary``).
    ``error_seconds`` is its standard error. ``steps`` is the number of steps counted, ``rejected`` the number left out as
    disturbed. Both exclude the steps before the configuration had settled.
    """

    seconds: float
    error_seconds: float
    steps: int
    rejected: int = 0

    def defect(self) -> str | None:
        """The reason why the window is not a valid measurement; None if it is valid."""
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            return f"{self.seconds} seconds per step"
        if not (math.isfinite(self.error_seconds) and self.error_seconds >= 0):
            return f"an error of {self.error_seconds} seconds"
        return None


class TrialFailed(Exception):
    """One trial failed; the message gives the reason. Training continues, and the search may continue."""


class Stopped(Exception):
    """Training has ended or is about to end; no further trial is possible."""


#: ``measure(config, steps)`` trains with ``config`` until a window of ``steps`` undisturbed steps is full. It raises
#: TrialFailed or Stopped. It blocks, and only the tuner's thread calls it.
Measure = Callable[[SchedulerConfig, int], Window]


class Reconfigurable(Protocol):
    """The part of a session that trials need; see ``session/session.py``."""

    world_size: int

    def reconfigure(self, config: SchedulerConfig, window: Any = None) -> None: ...


class MainGroupChanged(Stopped):
    """Another group of tensors than the tuned one is trained now."""


class TrialRunner:
    """Makes all ranks train with a configuration and waits for the measurement of each rank.

    Call ``measure`` and ``apply`` from the tuner's thread only. Any thread may call the other methods, which never block.

    Args:
        main_group: returns the group whose steps count at this moment, or None if there is none.
        settle_steps: steps that are left out at the beginning of each window; see :meth:`settle_steps`.

    ``stopped`` is the reason why no further trial is possible; None while trials are possible. ``applied`` is the configuration
    that was applied last.
    """

    def __init__(self, session: Reconfigurable, main_group: Callable[[], int | None], settle_steps: int) -> None:
        self._session = session
        self._main_group = main_group
        self._settle_steps = settle_steps
        self._changed = threading.Condition()  # guards all below
        self._trial = -1  # number of the trial whose reports are awaited
        self._reports: dict[int, Any] = {}  # by rank
        self.stopped: str | None = None
        self.applied: SchedulerConfig | None = None

    def settle_steps(self, config: SchedulerConfig) -> int:
        """The steps to leave out after a change to ``config``. Each change ends a static order, which comes back only after
        readiness has been the same for several steps."""
        return self._settle_steps + (FREEZE_STEPS if config.order == "static" else 0)

    def measure(self, config: SchedulerConfig, steps: int = 10, *, group: int) -> Window:
        """Train with ``config`` until every rank has a window of ``steps`` steps of ``group``. Returns the window of the
        slowest rank. There is no time limit, because a user may pause training for any time.

        Raises:
            TrialFailed: the transport does not support ``config``, or a rank has no such window.
            MainGroupChanged: ``group`` is not the main group any more.
            Stopped: training ends, or the job failed.
        """
        self._require_main(group)
        with self._changed:
            self._check()
            self._trial += 1
            self._reports.clear()
            window = {"trial": self._trial, "group": group, "settle": self.settle_steps(config), "steps": steps}
        self._propose(config, window)
        with self._changed:
            while not self._is_over():
                self._check()
                self._changed.wait()
            reports = dict(self._reports)
        try:
            return _slowest(reports)
        except TrialFailed:
            self._require_main(group)
            raise

    def apply(self, config: SchedulerConfig) -> None:
        """Make all ranks use ``config`` from one of the next steps on.

        Raises:
            TrialFailed: the transport does not support ``config``.
            Stopped: training ends, or the job failed.
        """
        with self._changed:
            self._check()
        self._propose(config, None)
        self.applied = config

    def on_message(self, rank: int, report: Any) -> None:
        """Receive a report from the meter of ``rank``. A report of an earlier trial is ignored."""
        with self._changed:
            if isinstance(report, dict) and report.get("trial") == self._trial:
                self._reports[rank] = report
                self._changed.notify()

    def stop(self, why: str) -> None:
        """End all trials. The first reason is kept."""
        with self._changed:
            self.stopped = self.stopped or why
            self._changed.notify()

    def _require_main(self, group: int) -> None:
        if (main := self._main_group()) != group:
            raise MainGroupChanged(f"group {group} of tensors is not trained any more, or is not the largest; that is {main}")

    def _propose(self, config: SchedulerConfig, window: dict[str, int] | None) -> None:
        try:
            self._session.reconfigure(config, window)
        except UnsupportedError as error:
            raise TrialFailed(str(error)) from error
        except CommschedError as error:
            raise Stopped(str(error)) from error

    def _is_over(self) -> bool:
        """Called with the lock held. The trial is over at the first failed rank: a new trial replaces the other ranks'
        windows."""
        failed = any("failed" in report for report in self._reports.values())
        return failed or len(self._reports) == self._session.world_size

    def _check(self) -> None:
        if self.stopped is not None:
            raise Stopped(self.stopped)


def _slowest(reports: dict[int, Any]) -> Window:
    windows = []
    for rank, report in sorted(reports.items()):
        if "failed" in report:
            raise TrialFailed(f"rank {rank}: {report['failed']}")
        try:
            window = Window(
                float(report["seconds"]), float(report["error"]), int(report["steps"]), rejected=int(report["rejected"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TrialFailed(f"rank {rank} reported {report}, which is no window: {error!r}") from error
        if (defect := window.defect()) is not None:
            raise TrialFailed(f"rank {rank} measured {defect}")
        windows.append(window)
    return max(windows, key=lambda window: window.seconds)
