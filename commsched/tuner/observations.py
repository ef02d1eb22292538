"""Trials that a searcher has received."""

from __future__ import annotations

import math
from statistics import fmean

from ..core.config import SchedulerConfig
from .trial import Window


class Observations:
    """Windows by configuration. A trial that failed, or whose time is not a positive number, has no window."""

    def __init__(self) -> None:
        self._windows: dict[SchedulerConfig, list[Window]] = {}

    def add(self, config: SchedulerConfig, window: Window | None) -> None:
        windows = self._windows.setdefault(config, [])
        if window is not None and 0 < window.seconds < math.inf:
            windows.append(window)

    def __contains__(self, config: SchedulerConfig) -> bool:
        return config in self._windows

    @property
    def configs(self) -> list[SchedulerConfig]:
        """Configurations in the order of their first trials."""
        return list(self._windows)

    def windows(self, config: SchedulerConfig) -> list[Window]:
        return self._windows.get(config, [])

    def seconds(self, config: SchedulerConfig) -> float | None:
        """Mean seconds of the configuration's windows. If all its trials failed, the mean of the slowest configuration; None if
        no trial has succeeded yet."""
        if windows := self._windows.get(config):
            return fmean(window.seconds for window in windows)
        return max((fmean(w.seconds for w in windows) for windows in self._windows.values() if windows), default=None)

    def best(self) -> SchedulerConfig | None:
        """The configuration with the lowest mean; None if no trial has succeeded yet."""
        succeeded = [config for config, windows in self._windows.items() if windows]
        return min(succeeded, key=lambda config: fmean(w.seconds for w in self._windows[config]), default=None)
