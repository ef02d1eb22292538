"""Surfaces of measured step times."""

import random

import pytest

from bench.tune.surface import Surface, window_of
from commsched.core.config import SchedulerConfig

SMALL, LARGE = SchedulerConfig(1_000_000, 2_000_000), SchedulerConfig(4_000_000, 4_000_000)


@pytest.fixture
def two():
    return Surface({SMALL: [[1.0, 1.1, 1.2], [2.0, 2.1, 2.2], [1.4, 1.5, 1.6]], LARGE: [[3.0, 3.0, 3.0]] * 3})


def test_a_window_is_its_median_and_how_far_that_may_be_off():
    window = window_of([1.0, 1.2, 1.1, 9.0, 1.1])
    assert (window.seconds, window.steps, window.rejected) == (1.1, 5, 0)
    assert window.error_seconds == pytest.approx(1.2533 * 1.4826 * 0.1 / 5**0.5)


def test_a_window_has_steps():
    with pytest.raises(ValueError, match="a window has steps"):
        window_of([])


def test_a_configuration_is_as_fast_as_in_the_median_of_its_passes(two):
    assert two.seconds == {SMALL: 1.5, LARGE: 3.0}
    assert two.best == SMALL
    assert two.regret(LARGE) == 1.0
    assert two.regret(SMALL) == 0
    assert two.noise == 0  # four of the six windows are at their median, and the others 0.27 and 0.4 off


def test_what_was_not_measured_is_taken_for_the_nearest_in_octaves(two):
    assert two.nearest(SchedulerConfig(1_900_000, 3_800_000)) == SMALL
    assert two.nearest(SchedulerConfig(3_000_000, 3_000_000)) == LARGE
    assert two.nearest(SchedulerConfig(4_000_000, 1)) == LARGE  # one partition goes, whatever the credit
    assert two.regret(SchedulerConfig(3_000_000, 3_000_000)) == 1.0


def test_a_draw_is_one_of_the_windows(two):
    seen = {two.draw(SMALL, 3, random.Random(seed)).seconds for seed in range(20)}
    assert seen == {1.1, 2.1, 1.5}


def test_a_longer_draw_takes_several_windows_and_then_all_again(two):
    window = two.draw(SMALL, 9, random.Random(0))
    assert (window.seconds, window.steps) == (1.5, 9)
    assert two.draw(SMALL, 20, random.Random(0)).steps == 20


def test_equal_seeds_draw_alike(two):
    assert two.draw(SMALL, 3, random.Random(5)) == two.draw(SMALL, 3, random.Random(5))


@pytest.mark.parametrize("passes", [{}, {SMALL: []}, {SMALL: [[1.0], []]}])
def test_a_surface_without_steps_is_refused(passes):
    with pytest.raises(ValueError, match="a surface has configurations, each with windows, each with steps"):
        Surface(passes)
