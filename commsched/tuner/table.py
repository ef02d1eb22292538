"""The trials of a journal as lines of a table: appended, never redrawn, so that it reads well in logs too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.config import Budget
from .text import milliseconds, size

_COLUMNS = "{:>11} {:>10} {:>10}  {:8} {:>16} {:>8}  {}"

#: Printed once, above the lines.
HEADER = _COLUMNS.format("trial", "partition", "credit", "policy", "ms per step", "best", "budget left")


class Table:
    """Makes a line of each record of a journal, in their order; ``budget`` is what it counts down."""

    def __init__(self, budget: Budget) -> None:
        self.trials = 0  # of the search
        self.best_seconds: float | None = None  # per step, in the search
        self._budget = budget
        self._counted = 0  # of them, those that did not fail
        self._windows = 0  # of the comparison
        self._steps = 0
        self._seconds = 0.0

    def line(self, record: Mapping[str, Any]) -> str:
        """The line of ``record``, a trial as ``journal.py`` writes it, with the number that it has there. Those of the
        comparison do not count as best: there are only two configurations in it, and the verdict has their times."""
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
        """Of what is limited, as ``Tuning`` counts it. Trials are those of the search that did not fail; steps and seconds are
        for the comparison too, which keeps some back, so that the search leaves a part of them."""
        limits = (
            (self._budget.trials if searching else None, self._counted, "trials"),
            (self._budget.steps, self._steps, "steps"),
            (self._budget.seconds, self._seconds, "s"),
        )
        return ", ".join(f"{max(0, round(limit - spent))} {unit}" for limit, spent, unit in limits if limit is not None)
