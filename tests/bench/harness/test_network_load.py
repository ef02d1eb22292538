"""None"""

from __future__ import annotations

import argparse
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import collectives
from bench.harness.network_load import Route, least_loads, least_seconds_per_byte, link_share, seconds_per_byte
from commsched.core.errors import ConfigError
from commsched.simulator.scenario import bytes_factor
from commsched.transports.averaging.reduce import narrow, widen

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


@st.composite
def placements(draw):
    """Rates of workers, and shares of their shards for the bytes of both halves and for those of the first half only."""
    workers = draw(st.lists(rates, min_size=2, max_size=6))
    weights = [draw(st.lists(rates, min_size=len(workers), max_size=len(workers))) for _ in range(2)]
    return workers, *([weight / sum(own) for weight in own] for own in weights)


@given(placements(), st.integers(0, 20), st.integers(0, 20))
def test_no_placement_carries_halves_faster(placement, both, only_first):
    """Some bytes are pushed and replied, and some only pushed, as before a norm."""
    workers, shares, shares_of_first = placement
    others = len(workers) - 1
    out = [both * (1 - x + others * x) + only_first * (1 - y) for x, y in zip(shares, shares_of_first)]
    into = [both * (1 - x + others * x) + only_first * others * y for x, y in zip(shares, shares_of_first)]
    took = max(max(load) / rate for load, rate in zip(zip(out, into), workers))
    for per_byte, first_share in least_loads(workers, clips=True):
        assert per_byte * (both + first_share * only_first) <= took * (1 + 1e-9)


@given(st.integers(2, 9), rates)
def test_halves_are_equally_long_with_equal_rates(workers, rate):
    loads = least_loads([rate] * workers, clips=True)
    least = bytes_factor(workers) / rate
    assert (pytest.approx(least), 0.5) in loads
    assert all(per_byte * share <= least / 2 * (1 + 1e-9) for per_byte, share in loads)
    assert least_loads([rate] * workers) == [(pytest.approx(least), 0)]


def test_pushes_to_servers_come_before_the_norm():
    assert least_loads([10, 5], [4, 4], clips=True) == [(least_seconds_per_byte([10, 5], [4, 4]), 1)]
    assert least_loads([5], clips=True) == [(0, 0)]


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


def route(*argv):
    parser = argparse.ArgumentParser()
    collectives.add_arguments(parser)
    args = parser.parse_args(list(argv))
    return Route.of(args, args.ranks_per_host)


def shared(*argv):
    return route("--workers", "4", "--ranks-per-host", "2", "--bandwidth", "1gbit", *argv)


@pytest.mark.parametrize(
    ("found", "nic", "network", "least"),
    [
        (route(), 1, 2, 2),
        (route("--workers", "4"), 1.5, 6, 6),
        (route("--workers", "4", "--servers", "1"), 4, 8, 8),
        (route("--wire", "float16"), 0.5, 1, 2),
        (route("--workers", "4", "--servers", "1", "--wire", "bfloat16"), 2, 4, 8),
        (shared(), 1, 2, 2),
        (shared("--wire", "bfloat16"), 0.5, 1, 2),
        # Each rank sends and gets half of its chunks across, twice: two ranks, two halves, twice.
        (shared("--hierarchy", "off"), 2, 4, 2),
        (shared("--hierarchy", "off", "--wire", "bfloat16"), 1, 2, 2),
        (shared("--collective", "rsag"), 2, 4, 2),
        (shared("--hierarchy", "off", "--servers", "1"), 4, 8, 4),
        (route("--hierarchy", "on"), 0, 0, 0),
        (route("--hierarchy", "on", "--servers", "1"), 1, 2, 2),
        (route("--hierarchy", "on", "--bandwidth", "1gbit"), 1, 2, 2),
    ],
)
def test_bytes_per_byte_of_gradient(found, nic, network, least):
    assert (found.nic_factor, found.network_factor, found.least_factor) == (nic, network, least)


def test_a_link_of_a_megabit_filled_to_a_half():
    assert link_share(3_000_000, 48.0, "1mbit") == 0.5
    assert link_share(3_000_000, 48.0, None) is None
    assert link_share(10 * 256 * 1024 - 1, 48.0, "1mbit") is None


def test_short_periods():
    assert Route(2, 1, 0, False, "bfloat16").short_periods() == (31, 29)
    assert Route(2, 8, 0, False, "bfloat16").short_periods() == (31, 29)
    assert Route(2, 8, 0, True, "float16").short_periods() == (31, 29)
    assert Route(2, 8, 0, True, "bfloat16").short_periods() == (11, 7)


def survives(values, wire):
    values = np.asarray(values, np.float32)
    narrowed, widened = bytearray(2 * values.size), np.empty_like(values)
    narrow(values.data, wire, narrowed)
    widen(narrowed, wire, widened.data)
    return np.array_equal(values, widened)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("hosts", [1, 2, 3, 8])
@pytest.mark.parametrize("ranks_per_host", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("hierarchical", [False, True])
def test_all_sums_and_averages_stay_exact(wire, hosts, ranks_per_host, hierarchical):
    found = Route(hosts, ranks_per_host, 0, hierarchical, wire)
    try:
        period, _ = found.short_periods()
    except ConfigError:
        assert (wire, hierarchical, hosts, ranks_per_host) == ("bfloat16", True, 8, 8)
        return
    # What ``collectives`` averages: an element and a repetition, each below the period, and the rank.
    numbers = np.arange(2 * period - 1)
    ranks = np.arange(hosts * ranks_per_host).reshape(-1, ranks_per_host if hierarchical else 1)
    sums = (numbers[:, None, None] + ranks).sum(axis=2)
    assert survives(sums.ravel(), wire)
    assert survives(sums.sum(axis=1) / ranks.size, wire)


def test_one_more_would_be_rounded():
    """Five ranks on each of two hosts: with the period that ranks alone allow, sums come out wrong."""
    assert not survives(5 * np.arange(61) + sum(range(5, 10)), "bfloat16")
    assert Route(2, 5, 0, True, "bfloat16").short_periods()[0] < 31
