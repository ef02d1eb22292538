"""Trials of configurations in a training that goes on: rank 0's side."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from ..core.config import SchedulerConfig
from ..core.errors import CommschedError, UnsupportedError
from .trial import Stopped, TrialFailed, Window


class Reconfigurable(Protocol):
    """A session, as far as trials need one; see ``session.py``."""

    world_size: int

    def reconfigure(self, config: SchedulerConfig, window: Any = None) -> None: ...


class MainGroupChanged(Stopped):
    """Another group of tensors is trained now than the one that is tuned for."""


class Trials:
    """Has all ranks train with a configuration, and waits for what each of them measured.

    ``measure`` and ``apply`` are for the tuner's thread; what else is told comes from any thread and never blocks.

    Args:
        main_group: the group whose steps count at this moment; None: there is none.
        settle_steps: left out at the beginning of each window.

    ``stopped`` says why no trial can be made any more; None: they can. ``applied`` is the configuration that was applied last.
    """

    def __init__(self, session: Reconfigurable, main_group: Callable[[], int | None], settle_steps: int) -> None:
        self._session = session
        self._main_group = main_group
        self.settle_steps = settle_steps
        self._changed = threading.Condition()  # guards all below
        self._trial = -1  # that reports are waited for of
        self._reports: dict[int, Any] = {}  # by rank
        self.stopped: str | None = None
        self.applied: SchedulerConfig | None = None

    def measure(self, config: SchedulerConfig, steps: int = 10, *, group: int) -> Window:
        """Train with ``config`` until every rank has a window of ``steps`` steps of ``group``; that of the slowest. Without a
        time limit: a user may pause training for as long as he likes.

        Raises:
            TrialFailed: the transport cannot do it, or a rank has no such window.
            MainGroupChanged: ``group`` is not the main one any more.
            Stopped: training ends, or the job failed.
        """
        self._require_main(group)
        with self._changed:
            self._check()
            self._trial += 1
            self._reports.clear()
            window = {"trial": self._trial, "group": group, "settle": self.settle_steps, "steps": steps}
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
        """Have all ranks use ``config`` from some step soon.

        Raises:
            TrialFailed: the transport cannot do it.
            Stopped: training ends, or the job failed.
        """
        with self._changed:
            self._check()
        self._propose(config, None)
        self.applied = config

    def on_told(self, rank: int, report: Any) -> None:
        """What the meter of ``rank`` reports. One of an earlier trial counts no more."""
        with self._changed:
            if isinstance(report, dict) and report.get("trial") == self._trial:
                self._reports[rank] = report
                self._changed.notify()

    def stop(self, why: str) -> None:
        """Make no more trials; the first reason counts."""
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
        """Called with the lock held. A rank that has failed needs no waiting for the others: their windows are replaced."""
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
