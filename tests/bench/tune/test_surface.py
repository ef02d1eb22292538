"""Surfaces of measured step times."""

import math
import random
from statistics import median, pstdev

import pytest

from bench.tune.case import Surface, window_of
from commsched.core.scheduler import SchedulerConfig

SMALL, LARGE = SchedulerConfig(1_000_000, 2_000_000), SchedulerConfig(4_000_000, 4_000_000)
OTHER = SchedulerConfig(16_000_000, 16_000_000)


@pytest.fixture
def two():
    return Surface({SMALL: [[1.0, 1.1, 1.2], [2.0, 2.1, 2.2], [1.4, 1.5, 1.6]], LARGE: [[3.0, 3.0, 3.0]] * 3})


def noisy(deviation, step_deviation, *, drift=0.0, seed=0):
    """300 configurations that do not differ, two windows of five steps each."""
    chance = random.Random(seed)
    passes = {}
    for size in range(1, 301):
        factors = [math.exp(chance.gauss(0, deviation) + drift * number) for number in range(2)]
        passes[SchedulerConfig(10_000 * size, 10_000 * size)] = [
            [factor * chance.gauss(1, step_deviation) for _ in range(5)] for factor in factors
        ]
    return Surface(passes)


def test_a_window_is_its_median_and_how_far_that_may_be_off():
    window = window_of([1.0, 1.2, 1.1, 9.0, 1.1])
    assert (window.seconds, window.steps, window.rejected) == (1.1, 5, 0)
    assert window.error_seconds == pytest.approx(1.2533 * 1.4826 * 0.1 / 5**0.5)


def test_a_window_has_steps():
    with pytest.raises(ValueError, match="a window has steps"):
        window_of([])


def test_a_configuration_is_as_fast_as_in_the_median_of_its_steps(two):
    assert two.seconds == {SMALL: 1.5, LARGE: 3.0}
    assert two.best == SMALL
    assert two.regret(LARGE) == 1.0
    assert two.regret(SMALL) == 0


def test_what_was_not_measured_is_taken_for_the_nearest_in_octaves(two):
    assert two.nearest(SchedulerConfig(1_900_000, 3_800_000)) == SMALL
    assert two.nearest(SchedulerConfig(3_000_000, 3_000_000)) == LARGE
    assert two.nearest(SchedulerConfig(4_000_000, 1)) == LARGE  # one partition goes, whatever the credit
    assert two.regret(SchedulerConfig(3_000_000, 3_000_000)) == 1.0


@pytest.mark.parametrize(("deviation", "step_deviation"), [(0.03, 0.01), (0.03, 0.0), (0.02, 0.02), (0.01, 0.02)])
def test_how_much_windows_differ_is_found_whatever_their_steps_do(deviation, step_deviation):
    assert noisy(deviation, step_deviation).window_deviation == pytest.approx(deviation, rel=0.3)


def test_windows_that_differ_as_their_steps_do_differ_no_more():
    assert noisy(0.0, 0.02).window_deviation < 0.008
    assert noisy(0.0, 0.0).window_deviation == 0


def test_a_drift_from_pass_to_pass_counts_as_windows_that_differ():
    assert noisy(0.0, 0.0, drift=0.05).window_deviation == pytest.approx(1.4826 * 0.05 / 2**0.5)


def test_a_few_disturbed_windows_do_not_count():
    surface = noisy(0.01, 0.005)
    windows = {config: list(own) for config, own in surface.passes.items()}
    for config in list(windows)[:20]:
        windows[config][0] = [3.0] * 5
    assert Surface(windows).window_deviation == pytest.approx(surface.window_deviation, rel=0.15)


def test_one_pass_does_not_say_how_much_windows_differ():
    one = Surface({SMALL: [[1.0, 1.1]]})
    with pytest.raises(ValueError, match="one pass does not show how much windows differ"):
        one.draw(SMALL, 3, random.Random(0))


def test_a_draw_takes_its_steps_from_one_window_where_windows_do_not_differ_as_a_whole():
    surface = Surface({SMALL: [[1.0, 2.0], [2.0, 1.0, 1.0, 2.0]], LARGE: [[3.0]] * 2})
    assert surface.window_deviation == 0
    drawn = [surface.draw(SMALL, 3, random.Random(seed)) for seed in range(20)]
    assert {window.seconds for window in drawn} == {1.0, 2.0}
    assert {window.steps for window in drawn} == {3}
    assert surface.draw(LARGE, 20, random.Random(0)).seconds == 3.0
    apart = Surface({SMALL: [[1.0] * 5, [2.0] * 5], LARGE: [[3.0]] * 2, OTHER: [[3.0]] * 2})
    assert apart.window_deviation == 0  # most do not differ
    assert {apart.draw(SMALL, 9, random.Random(seed)).seconds for seed in range(20)} == {1.0, 2.0}  # never a mixture


def test_long_draws_are_off_as_a_whole_and_never_the_same():
    surface = noisy(0.03, 0.01)
    config = next(iter(surface.passes))
    drawn = [surface.draw(config, 200, random.Random(seed)) for seed in range(400)]
    assert len({window.seconds for window in drawn}) == 400
    centres = [math.log(median(window)) for window in surface.passes[config]]
    expected = math.hypot(surface.window_deviation, pstdev(centres))  # one window or the other, and the factor
    assert pstdev(math.log(window.seconds) for window in drawn) == pytest.approx(expected, rel=0.15)
    assert max(window.error_seconds for window in drawn) < 0.005  # the factor is the same for all steps


def test_equal_seeds_draw_alike(two):
    assert two.draw(SMALL, 3, random.Random(5)) == two.draw(SMALL, 3, random.Random(5))


@pytest.mark.parametrize("passes", [{}, {SMALL: []}, {SMALL: [[1.0], []]}])
def test_a_surface_without_steps_is_refused(passes):
    with pytest.raises(ValueError, match="a surface has configurations, each with windows, each with steps"):
        Surface(passes)
