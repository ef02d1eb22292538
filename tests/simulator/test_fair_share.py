import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.simulator.network_sharing import CONNECTION, Hosts, SharedNics, fair_rates
from commsched.simulator.scenario import Cluster, WorkerClass, equal_workers


class Matrix:
    """Resources with their users written out: connections x resources."""

    def __init__(self, loads, capacities):
        self.loads = np.array(loads, float)
        self.capacities = np.array(capacities, float)

    def used(self, rates):
        return rates @ self.loads

    def users(self, resources):
        return (self.loads[:, resources] > 0).any(axis=1)

    def held(self, growing):
        return np.zeros_like(growing)


def connections(rows, hosts):
    return np.array([(*row, hosts.members_across(*row[:2])) for row in rows], CONNECTION)


def test_by_hand():
    # Two share the first link, two the second; the one on both gets what the fuller lets it have.
    assert fair_rates(3, Matrix([[1, 0], [1, 1], [0, 1]], [2, 10])) == pytest.approx([1, 1, 9])
    assert fair_rates(2, Matrix([[3], [1]], [8])) == pytest.approx([2, 2])


def test_no_limit_is_refused():
    with pytest.raises(ValueError, match="a connection uses no resource"):
        fair_rates(1, Matrix([[0]], [1]))


@given(st.data(), st.integers(1, 6), st.integers(1, 4))
def test_max_min_fair(data, count, resources):
    loads = np.array(
        data.draw(st.lists(st.lists(st.integers(0, 2), min_size=resources, max_size=resources), min_size=count, max_size=count))
    )
    loads[:, 0] += 1  # everybody uses something
    matrix = Matrix(loads, data.draw(st.lists(st.integers(1, 9), min_size=resources, max_size=resources)))
    rates = fair_rates(count, matrix)
    used = matrix.used(rates)
    assert (used <= matrix.capacities * (1 + 1e-9)).all()
    full = used >= matrix.capacities * (1 - 1e-9)
    for each, load in enumerate(loads):  # it cannot have more but from one that has no more
        bottlenecks = full & (load > 0)
        assert any(rates[each] >= rates[loads[:, resource] > 0].max() * (1 - 1e-9) for resource in np.flatnonzero(bottlenecks))


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans())
def test_nics_are_used_as_a_matrix_written_out_says(data, counts, servers):
    """Every worker by itself, from the definition, against what the regular structure makes of it."""
    cluster = Cluster(tuple(WorkerClass(1.0 + i, count) for i, count in enumerate(counts)), (2.0, 3.0) if servers else ())
    hosts = Hosts(cluster)
    possible = [
        (worker, shard, is_push)
        for worker in range(len(counts))
        for shard in range(len(hosts.shard_rates))
        for is_push in (True, False)
        if hosts.members_across(worker, shard)
    ]
    if not possible:
        return
    rows = data.draw(st.lists(st.sampled_from(possible), min_size=1, unique=True))
    class_of_rank = np.repeat(np.arange(len(counts)), counts)
    ranks = len(class_of_rank)
    nics = ranks + 2 * servers
    loads = np.zeros((len(rows), 2 * nics))  # egress of all, then ingress
    for connection, (worker, shard, is_push) in enumerate(rows):
        host = ranks + shard if servers else shard
        for rank in np.flatnonzero(class_of_rank == worker):
            if rank != host:
                loads[connection, rank + (0 if is_push else nics)] += 1
                loads[connection, host + (nics if is_push else 0)] += 1
    rates = [cluster.workers[each].rate_bytes_per_second for each in class_of_rank] + list(cluster.server_rates)
    found = fair_rates(len(rows), SharedNics(connections(rows, hosts), hosts))
    assert found == pytest.approx(fair_rates(len(rows), Matrix(loads, 2 * rates)))


def test_pushes_to_one_shard_share_its_ingress():
    hosts = Hosts(equal_workers(5, 1.0))
    assert fair_rates(1, SharedNics(connections([(0, 2, True)], hosts), hosts)) == pytest.approx([1 / 4])
    assert fair_rates(2, SharedNics(connections([(0, 2, True), (0, 2, False)], hosts), hosts)) == pytest.approx([1 / 4] * 2)


def test_replies_get_what_their_hosts_pushes_leave():
    """Rank 1 pushes to rank 0's shard, and rank 1's shard replies to rank 0, over one NIC; rank 2 has its own."""
    hosts = Hosts(equal_workers(3, 6.0, detailed=True))
    rows = [(1, 0, True), (0, 1, False), (0, 2, False)]
    assert fair_rates(3, SharedNics(connections(rows, hosts), hosts)) == pytest.approx([2, 2, 2])  # the ingress of rank 0
    rates = fair_rates(3, SharedNics(connections(rows, hosts), hosts, pushes_first=True))
    assert rates == pytest.approx([3, 0, 3])
    alone = fair_rates(1, SharedNics(connections(rows[1:2], hosts), hosts, pushes_first=True))
    assert alone == pytest.approx([6])
