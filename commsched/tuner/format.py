"""Formatting for people: sizes, times, and the trials of a journal as lines of a table. Lines are appended, never redrawn, so
that the table reads well in logs too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..settings import Budget


def size(nbytes: int) -> str:
    """Format a size in decimal units: ``4.0 MB``, ``64 KB``, ``160 bytes``."""
    if nbytes < 1000:
        return f"{nbytes} bytes"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1_000_000 else f"{nbytes / 1e3:.0f} KB"


def milliseconds(seconds: float, like: float | None = None) -> str:
    """Format a time as milliseconds without a unit. The number of decimals gives about three digits to ``like``, or by default
    to the number itself."""
    like = like or seconds
    return f"{seconds * 1e3:.{0 if like >= 1 else 1 if like >= 0.01 else 2}f}"


_COLUMNS = "{:>11} {:>10} {:>10}  {:8} {:>16} {:>8}  {}"

#: Printed once, above the lines.
HEADER = _COLUMNS.format("trial", "partition", "credit", "policy", "ms per step", "best", "budget left")


class Table:
    """Formats each record of a journal, in order, as a line. ``budget`` is the budget that the last column counts down."""

    def __init__(self, budget: Budget) -> None:
        self.trials = 0  # of the search
        self.best_seconds: float | None = None  # per step, in the search
        self._budget = budget
        self._counted = 0  # trials that did not fail
        self._windows = 0  # of the comparison
        self._steps = 0
        self._seconds = 0.0

    def line(self, record: Mapping[str, Any]) -> str:
        """The line of ``record``, a trial as ``journal.py`` writes it, with its number there. Windows of the comparison do not
        count as best: it has only two configurations, and the verdict reports their times."""
        searching, seconds = record["phase"] == "search", record["seconds"]
        self._seconds += record["took_seconds"]
        self._steps += record["spent_steps"]
        if searching:
            self.trials += 1
        else:
            self._windows += 1
        if record["status"] == "ok":
            if searching:
                self._counted += 1
                self.best_seconds = min(seconds, self.best_seconds or seconds)
            measured = f"{milliseconds(seconds)} +- {milliseconds(record['error_seconds'], like=seconds)}"
        else:
            measured = f"failed: {record['why']}"
        config = record["config"]
        return _COLUMNS.format(
            record["trial"] if searching else f"compared {self._windows}",
            size(config["partition_bytes"]),
            size(config["credit_bytes"]),
            config["policy"],
            measured,
            "" if self.best_seconds is None else milliseconds(self.best_seconds),
            self._left(searching),
        ).rstrip()

    def _left(self, searching: bool) -> str:
        """The rest of each limited budget, as ``SearchRun`` counts it. Trials are successful trials of the search. Steps and
        seconds also cover the comparison, for which the search leaves a part of them."""
        limits = (
            (self._budget.trials if searching else None, self._counted, "trials"),
            (self._budget.steps, self._steps, "steps"),
            (self._budget.seconds, self._seconds, "s"),
        )
        return ", ".join(f"{max(0, round(limit - spent))} {unit}" for limit, spent, unit in limits if limit is not None)
