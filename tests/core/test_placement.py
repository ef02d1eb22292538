"""Placement: every rank computes the same, and load is even."""

from hypothesis import given
from hypothesis import strategies as st

from commsched.core.plan import place


@given(st.integers(0, 2**32 - 1), st.integers(1, 64))
def test_every_partition_has_a_server(partition, servers):
    assert 0 <= place(partition, servers) < servers


@given(st.integers(0, 1000), st.integers(1, 64))
def test_every_round_goes_to_each_server_once(round_, servers):
    partitions = range(round_ * servers, (round_ + 1) * servers)
    assert sorted(place(partition, servers) for partition in partitions) == list(range(servers))


@given(st.integers(3, 64), st.integers(0, 1000))
def test_of_three_or_more_servers_consecutive_partitions_go_to_different_ones(servers, partition):
    assert place(partition, servers) != place(partition + 1, servers)


def test_weights_that_alternate_with_biases_are_spread_over_both_servers():
    weights = [place(partition, 2) for partition in range(0, 40, 2)]
    assert weights.count(0) == weights.count(1)
