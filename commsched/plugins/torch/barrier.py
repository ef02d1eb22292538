"""What it costs to wait for all averages before the next forward begins: said once, with the line that does it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import monotonic

import torch

log = logging.getLogger("commsched")

#: So many steps in which one line waited are measured before it is named.
STEPS = 10

_NOT_THE_USERS = (
    *(f"{directory}/" for directory in (Path(torch.__file__).parent, Path(__file__).parents[2])),
    contextlib.__file__,
)


class Barrier:
    """Measures where this rank waits for all averages of a step, instead of for each where the next forward reads it.

    Gradients may be read before ``step()``, for a global norm or a log line; or the whole update may need all of them. Then
    communication overlaps with backward only. After :data:`STEPS` such steps the log says so, and what it costs; then, and on
    ranks that are not to ``say`` it, nothing is measured any more. Called from the engine's main thread.
    """

    def __init__(self, say: bool) -> None:
        self._measures = say
        self._line: str | None = None  # of the first wait in this step, and why
        self._waited_seconds = 0.0
        self._last_step_at: float | None = None
        self._steps: dict[str, list[tuple[float, float]]] = {}  # by line: seconds waited, and of the whole step

    def waiting(self, why: str) -> contextlib.AbstractContextManager[object]:
        """Around a wait for averages; ``why`` the step has to wait, as a clause."""
        return self._measure(why) if self._measures else contextlib.nullcontext()

    @contextlib.contextmanager
    def _measure(self, why: str) -> Iterator[None]:
        if self._line is None:
            self._line = f"{line_of_the_user()}: {why}"
        began = monotonic()
        try:
            yield
        finally:
            self._waited_seconds += monotonic() - began

    def step_ended(self) -> None:
        """A step is from here to here."""
        if not self._measures:
            return
        now = monotonic()
        if self._line is not None and self._last_step_at is not None:
            steps = self._steps.setdefault(self._line, [])
            steps.append((self._waited_seconds, now - self._last_step_at))
            if len(steps) == STEPS:
                self._say(self._line, steps)
        self._last_step_at, self._line, self._waited_seconds = now, None, 0.0

    def _say(self, line: str, steps: list[tuple[float, float]]) -> None:
        self._measures = False
        self._steps = {}
        waited, whole = (median(seconds) for seconds in zip(*steps))
        log.info(
            "%s, so all averages are waited for there: median %.1f ms of %.1f ms per step (%.0f %%), which the next forward "
            "cannot overlap",
            line,
            1e3 * waited,
            1e3 * whole,
            100 * waited / whole,
        )


def line_of_the_user() -> str:
    """``file:line`` of the innermost frame of this thread that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
