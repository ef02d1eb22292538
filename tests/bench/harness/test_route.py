import argparse

import numpy as np
import pytest

from bench import collectives
from bench.harness.route import Route, link_share
from commsched.core.errors import ConfigError
from commsched.transports.averaging.reduce import narrow, widen


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
