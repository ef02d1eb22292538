from __future__ import annotations

from typing import Any

import pytest

from commsched.cli.tune import HEADER, Table
from commsched.core.scheduler import SchedulerConfig
from commsched.settings import Budget
from commsched.tuner.journal import Trial
from commsched.tuner.trials import Window

DEFAULT = SchedulerConfig(4_000_000, 16_000_000)
SMALL = SchedulerConfig(500_000, 64_000, "fifo")


def record(phase: Any, config: SchedulerConfig, window: Window | None, why: str | None = None) -> Any:
    """As it comes from a journal."""
    spent_steps = 3 + (10 if window is None else window.steps + window.rejected)
    return {"schema": 1, "key": {}, "trial": 0, **Trial(phase, config, window, 5.0, spent_steps, why).to_record()}


def lines(table: Table, *records: Any) -> list[str]:
    return [HEADER, *(table.line({**each, "trial": number}) for number, each in enumerate(records))]


def test_a_search_and_its_comparison() -> None:
    table = Table(Budget(trials=3))
    assert lines(
        table,
        record("search", DEFAULT, Window(0.4123, 0.0021, 10)),
        record("search", SMALL, None, why="rank 1: 6 of 15 steps were disturbed"),
        record("search", SchedulerConfig(1_000_000, 8_000_000), Window(0.337, 0.0013, 10, 2)),
        record("search", DEFAULT, Window(0.35, 0.0013, 10)),
        record("compare", DEFAULT, Window(0.41, 0.001, 10)),
        record("compare", SchedulerConfig(1_000_000, 8_000_000), Window(0.3, 0.001, 10)),
    ) == [
        "      trial  partition     credit  policy        ms per step     best  budget left",
        "          0     4.0 MB    16.0 MB  priority     412.3 +- 2.1    412.3  2 trials",
        "          1     500 KB      64 KB  fifo     failed: rank 1: 6 of 15 steps were disturbed    412.3  2 trials",
        "          2     1.0 MB     8.0 MB  priority     337.0 +- 1.3    337.0  1 trials",
        "          3     4.0 MB    16.0 MB  priority     350.0 +- 1.3    337.0  0 trials",
        " compared 1     4.0 MB    16.0 MB  priority     410.0 +- 1.0    337.0",
        " compared 2     1.0 MB     8.0 MB  priority     300.0 +- 1.0    337.0",
    ]
    assert (table.trials, table.best_seconds) == (4, 0.337)


@pytest.mark.parametrize(
    ("budget", "left"),
    [
        (Budget(steps=100), ["85 steps", "72 steps"]),
        (Budget(seconds=60.0), ["55 s", "50 s"]),
        (Budget(trials=5, steps=20, seconds=7.0), ["4 trials, 5 steps, 2 s", "0 steps, 0 s"]),
        (Budget(), ["", ""]),
    ],
)
def test_steps_and_seconds_are_for_the_comparison_too(budget: Budget, left: list[str]) -> None:
    table = Table(budget)
    search, compare = Window(0.1, 0.001, 10, 2), Window(0.1, 0.001, 10)
    for one, expected in zip([record("search", DEFAULT, search), record("compare", DEFAULT, compare)], left):
        assert table.line(one).endswith(f"100.0  {expected}".rstrip())


@pytest.mark.parametrize(("seconds", "text"), [(12.345, "12345 +- 123"), (0.01234, "12.3 +- 0.1"), (0.0012345, "1.23 +- 0.01")])
def test_times_of_any_size_are_told_apart(seconds: float, text: str) -> None:
    assert text in Table(Budget()).line(record("search", DEFAULT, Window(seconds, seconds / 100, 10)))


def test_nothing_is_best_before_a_trial_has_succeeded() -> None:
    table = Table(Budget(trials=12))
    assert table.line(record("search", DEFAULT, None, why="boom")).endswith("failed: boom           12 trials")
    assert table.best_seconds is None
