"""Whether a training's step time has changed for good since it was tuned. Pure."""

from __future__ import annotations

from statistics import median


class Drift:
    """Told how long each step took; ``found`` once they have become slower, or faster, to stay.

    The median of the first ``window_steps`` steps is what the later ones are compared with. Medians, and several in a row: an
    evaluation, a checkpoint or a busy minute is no reason to tune again.

    Args:
        window_steps: steps of which one median is made.
        windows: medians in a row that must deviate, all to the same side.
        tolerance: by more than this part of the first.
        rest_steps: steps that must have passed in any case.
    """

    def __init__(self, *, window_steps: int = 50, windows: int = 5, tolerance: float = 0.10, rest_steps: int = 0) -> None:
        self.found = False
        self.before_seconds = 0.0  # median of the first window
        self.now_seconds = 0.0  # median of the last
        self._window_steps = window_steps
        self._windows = windows
        self._tolerance = tolerance
        self._rest_steps = rest_steps
        self._steps = 0
        self._window: list[float] = []
        self._side = 0  # of the last median: 1 slower, -1 faster, 0 neither
        self._alike = 0  # medians in a row that were on that side

    def add(self, seconds: float) -> None:
        """One more step, which took so long."""
        self._steps += 1
        self._window.append(seconds)
        if len(self._window) == self._window_steps:
            self.now_seconds = median(self._window)
            self._window.clear()
            self._compare()

    def _compare(self) -> None:
        if self.before_seconds == 0.0:
            self.before_seconds = self.now_seconds
        change = self.now_seconds - self.before_seconds
        side = 0 if abs(change) <= self._tolerance * self.before_seconds else 1 if change > 0 else -1
        self._alike = self._alike + 1 if side == self._side else 1
        self._side = side
        self.found = self.found or (side != 0 and self._alike >= self._windows and self._steps >= self._rest_steps)
