"""What is to be measured in a case."""

from itertools import pairwise

import pytest

from bench.tune.case import Case
from commsched.core.errors import ConfigError
from commsched.core.scheduler import SchedulerConfig

DEFAULT = {"model": "uniform", "workers": 2, "bandwidth": "500mbit", "rho": 1.0, "megabytes": 16.0, "transport": "ps"}


def case(**changed):
    return Case(**{**DEFAULT, **changed})


def test_the_fine_grid_is_the_lattice_that_searches_know():
    grid = case(coarse=False).grid
    assert grid[0] == SchedulerConfig()
    assert set(grid) <= {*case(coarse=False).space.lattice(), SchedulerConfig()}
    assert {config.partition_bytes for config in grid} == {125_000 * 2**octave for octave in range(8)}
    assert [config.credit_bytes for config in grid if config.partition_bytes == 500_000] == [500_000 * 2**n for n in range(6)]


def test_what_no_search_could_tell_apart_is_measured_once():
    found = case(coarse=False)
    assert found.space.total_bytes == 16_000_032  # so the lattice has credits of 16 MB, and of 32 bytes more
    credits = [config.credit_bytes for config in found.grid if config.partition_bytes == 8_000_000]
    assert credits == [8_000_000, 16_000_000]


def test_the_coarse_grid_is_every_other_octave_and_has_where_searches_begin():
    fine, coarse = case(coarse=False), case(coarse=True)
    assert set(coarse.grid) < set(fine.grid)
    assert SchedulerConfig() in coarse.grid
    sizes = sorted({config.partition_bytes for config in coarse.grid})
    assert all(after / before >= 2 for before, after in pairwise(sizes))
    assert [config.credit_bytes for config in coarse.grid if config.partition_bytes == 125_000] == [125_000, 500_000, 2_000_000]


def test_where_searches_begin_is_measured_even_outside_the_bounds():
    small = case(coarse=True, megabytes=1.0)
    assert SchedulerConfig() not in small.space.lattice()
    assert SchedulerConfig() in small.grid


def test_each_pass_takes_the_whole_grid_and_the_chosen_sizes_in_an_order_of_its_own():
    orders = case(coarse=False).orders(3)
    places = list(range(len(case(coarse=False).grid) + 1))
    assert [sorted(order) for order in orders] == [places] * 3
    assert len({tuple(order) for order in orders}) == 3
    assert orders == case(coarse=False).orders(3)


def test_a_step_takes_at_least_what_computation_does():
    found = case(coarse=True)
    assert found.expected_step_seconds() > found.scaling.profile.compute_seconds
    assert case(coarse=True, bandwidth="250mbit").expected_step_seconds() == pytest.approx(2 * found.expected_step_seconds())


def test_no_such_model():
    with pytest.raises(ConfigError, match="model=alexnet: must be one of uniform, "):
        case(coarse=True, model="alexnet").expected_step_seconds()
