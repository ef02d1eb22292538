"""What a searcher was told of."""

from __future__ import annotations

import math
from statistics import fmean

from ..core.config import SchedulerConfig
from .trial import Window


class Tried:
    """Windows by configuration; a trial that failed, or whose time is not a positive number, has none."""

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
        """In the order in which they were first told."""
        return list(self._windows)

    def windows(self, config: SchedulerConfig) -> list[Window]:
        return self._windows.get(config, [])

    def seconds(self, config: SchedulerConfig) -> float | None:
        """Mean of its windows; that of the slowest configuration where its trials failed; None: nothing has succeeded yet."""
        if windows := self._windows.get(config):
            return fmean(window.seconds for window in windows)
        return max((fmean(w.seconds for w in windows) for windows in self._windows.values() if windows), default=None)

    def best(self) -> SchedulerConfig | None:
        """The lowest mean; None: nothing has succeeded yet."""
        succeeded = [config for config, windows in self._windows.items() if windows]
        return min(succeeded, key=lambda config: fmean(w.seconds for w in self._windows[config]), default=None)
