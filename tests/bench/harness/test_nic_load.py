from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.harness.nic_load import least_seconds_per_byte, seconds_per_byte
from commsched.simulator.scenario import bytes_factor

rates = st.integers(1, 40)


@pytest.mark.parametrize(
    ("workers", "servers", "factor"),
    [(1, 0, 0), (2, 0, 1), (4, 0, 1.5), (8, 0, 1.75), (4, 1, 4), (4, 2, 2), (4, 4, 1), (4, 8, 1), (1, 1, 1), (3, 2, 1.5)],
)
def test_bytes_factor(workers, servers, factor):
    assert bytes_factor(workers, servers) == factor


@pytest.mark.parametrize(("workers", "servers"), [(0, 0), (2, -1)])
def test_bytes_factor_of_no_job(workers, servers):
    with pytest.raises(ValueError, match=f"at least 1 worker and 0 servers, not {workers} and {servers}"):
        bytes_factor(workers, servers)


@given(st.integers(1, 9), st.integers(0, 9), rates)
def test_with_equal_rates_it_is_the_factor_by_the_rate(workers, servers, rate):
    expected = bytes_factor(workers, servers) / rate
    assert seconds_per_byte([rate] * workers, [rate] * servers) == pytest.approx(expected)
    assert least_seconds_per_byte([rate] * workers, [rate] * servers) == pytest.approx(expected)


@given(st.lists(rates, min_size=1, max_size=6), st.lists(rates, max_size=6))
def test_no_placement_is_worse_than_an_even_one(workers, servers):
    assert least_seconds_per_byte(workers, servers) <= seconds_per_byte(workers, servers) * (1 + 1e-12)


@given(st.lists(rates, min_size=2, max_size=6), st.lists(rates, max_size=4))
def test_the_least_load_is_that_of_a_placement(workers, servers):
    """Give every NIC what it can carry in the time that is said to be enough: all bytes must find a place."""
    seconds = least_seconds_per_byte(workers, servers, shards_on_workers=True)
    count = len(workers)
    assert min(workers) * seconds >= 1 - 1e-9  # each worker's own gradients
    if count > 2:
        placed = sum((rate * seconds - 1) / (count - 2) for rate in workers) + sum(rate * seconds / count for rate in servers)
        assert placed >= 1 - 1e-9
        least = 1 / min(workers)
        assert placed == pytest.approx(1) or seconds == pytest.approx(least)


@pytest.mark.parametrize(("workers", "servers"), [(4, 2), (8, 3), (3, 1)])
def test_with_shards_on_both_it_is_the_optimum_of_byteps(workers, servers):
    published = Fraction(2 * workers * (workers - 1), workers**2 + servers * workers - 2 * servers)
    assert least_seconds_per_byte([1] * workers, [1] * servers, shards_on_workers=True) == pytest.approx(float(published))


def test_one_slow_link():
    assert seconds_per_byte([10, 10, 10, 5]) == pytest.approx(1.5 / 5)
    assert least_seconds_per_byte([10, 10, 10, 5]) == pytest.approx(1 / 5)  # the slow worker still sends what is its own
    assert seconds_per_byte([10, 10], [10, 2]) == pytest.approx(1 / 2)
    assert least_seconds_per_byte([10, 10], [10, 2]) == pytest.approx(2 / 12)


def test_one_worker_needs_no_network():
    assert seconds_per_byte([5]) == least_seconds_per_byte([5]) == 0


@pytest.mark.parametrize("formula", [seconds_per_byte, least_seconds_per_byte])
def test_impossible_networks_are_refused(formula):
    with pytest.raises(ValueError, match="at least 1 worker"):
        formula([])
    with pytest.raises(ValueError, match="a rate is not positive"):
        formula([1, 0])
    with pytest.raises(ValueError, match="neither servers nor workers that hold a shard"):
        least_seconds_per_byte([1], [], shards_on_workers=False)
