from __future__ import annotations

import pytest

from commsched.tuner.stats import DriftDetector


def feed(drift: DriftDetector, *windows: float, steps: int = 10) -> bool:
    for seconds in windows:
        for _ in range(steps):
            drift.add(seconds)
    return drift.found


def make(rest_steps: int = 0) -> DriftDetector:
    return DriftDetector(window_steps=10, windows=3, tolerance=0.1, rest_steps=rest_steps)


@pytest.mark.parametrize("now", [1.2, 0.8])
def test_steps_that_have_become_slower_or_faster_to_stay(now: float) -> None:
    drift = make()
    assert not feed(drift, 1.0, 1.0, 1.0, 1.0, now, now)
    assert feed(drift, now)
    assert (drift.before_seconds, drift.now_seconds) == (1.0, now)


def test_what_stays_within_the_tolerance_is_no_drift() -> None:
    assert not feed(make(), 1.0, *[1.09, 0.92] * 10, *[1.09] * 10, *[0.91] * 10)


def test_a_busy_while_is_no_drift() -> None:
    assert not feed(make(), 1.0, *[2.0, 2.0, 1.0] * 10)


def test_both_sides_in_turn_are_no_drift() -> None:
    assert not feed(make(), 1.0, *[1.5, 1.5, 0.5, 0.5] * 10)


def test_single_steps_that_take_long_do_not_count() -> None:
    drift = make()
    for number in range(1000):
        drift.add(50.0 if number % 5 == 0 else 1.0)
    assert not drift.found


def test_no_sooner_than_after_the_rest() -> None:
    drift = make(rest_steps=100)
    assert not feed(drift, 1.0, *[2.0] * 8)
    assert feed(drift, 2.0)


def test_found_stays_found() -> None:
    drift = make()
    assert feed(drift, 1.0, 2.0, 2.0, 2.0)
    assert feed(drift, 1.0, 1.0, 1.0, 1.0)
