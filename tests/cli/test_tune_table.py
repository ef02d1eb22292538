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
        record("search", SMALL, None, why="rank 1: disturbed"),
        record("search", SchedulerConfig(1_000_000, 8_000_000), Window(0.337, 0.0013, 10, 2)),
        record("search", DEFAULT, Window(0.35, 0.0013, 10)),
        record("compare", DEFAULT, Window(0.41, 0.001, 10)),
        record("compare", SchedulerConfig(1_000_000, 8_000_000), Window(0.3, 0.001, 10)),
    ) == [
        "      trial  partition     credit  policy        ms per step     best  left",
        "          0     4.0 MB    16.0 MB  priority     412.3 +- 2.1    412.3  2 trials, about 170 s at most",
        "          1     500 KB      64 KB  fifo     failed: rank 1: disturbed    412.3  2 trials, about 170 s at most",
        "          2     1.0 MB     8.0 MB  priority     337.0 +- 1.3    337.0  1 trial, about 165 s at most",
        "          3     4.0 MB    16.0 MB  priority     350.0 +- 1.3    337.0  0 trials, about 160 s at most",
        " compared 1     4.0 MB    16.0 MB  priority     410.0 +- 1.0    337.0  about 155 s at most",
        " compared 2     1.0 MB     8.0 MB  priority     300.0 +- 1.0    337.0  about 150 s at most",
    ]
    assert (table.trials, table.best_seconds) == (4, 0.337)


@pytest.mark.parametrize(
    ("budget", "left"),
    [
        (Budget(steps=100), ["85 steps, about 28 s at most", "72 steps, about 26 s at most"]),
        (Budget(seconds=60.0), ["about 55 s at most", "about 50 s at most"]),
        (Budget(trials=5, steps=20, seconds=7.0), ["4 trials, 5 steps, about 2 s at most", "0 steps, about 0 s at most"]),
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
    line = table.line(record("search", DEFAULT, None, why="boom"))
    assert line.endswith("failed: boom           12 trials, about 220 s at most")
    assert table.best_seconds is None
