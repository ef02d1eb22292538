"""Placement: every rank computes the same, and load is even, in total and along the order."""

from hypothesis import given
from hypothesis import strategies as st

from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import Plan, cut

SIZES = st.lists(st.integers(0, 20_000), max_size=60)


def plan(numels: list[int], servers: int, partition_bytes: int = 20_000) -> Plan:
    return cut(Manifest(tuple(TensorSpec(f"w{i}", (n,), "float32") for i, n in enumerate(numels))), partition_bytes, 0, servers)


def loads(partitions, servers: int) -> list[int]:
    nbytes = [0] * servers
    for at in partitions:
        nbytes[at.server] += at.nbytes
    return nbytes


@given(SIZES, st.integers(1, 64))
def test_every_partition_has_a_server_whatever_the_rank(numels, servers):
    placed = plan(numels, servers)
    assert all(0 <= at.server < servers for at in placed.partitions)
    assert placed.partitions == plan(numels, servers).partitions


@given(SIZES, st.integers(1, 64))
def test_servers_change_neither_borders_nor_order(numels, servers):
    def borders(of: Plan):
        return [(at.index, at.dtype, at.start, at.stop, at.tensors) for at in of.partitions]

    assert borders(plan(numels, servers)) == borders(plan(numels, 1))


@given(st.lists(st.integers(4000, 20_000), min_size=1, max_size=60), st.integers(1, 8), st.data())
def test_any_stretch_of_the_order_loads_all_servers_equally(numels, servers, data):
    """Each partition counts as its bytes and those of a message."""
    partitions = plan(numels, servers).partitions
    first = data.draw(st.integers(0, len(partitions)))
    last = data.draw(st.integers(first, len(partitions)))
    work = [0] * servers
    for at in partitions[first:last]:
        work[at.server] += at.nbytes + 16_000
    assert max(work) - min(work) <= 2 * (20_000 + 16_000)


def test_equal_partitions_go_round():
    partitions = plan([5000] * 12, 4).partitions
    assert [at.server for at in partitions] == [0, 1, 2, 3] * 3


def test_weights_that_alternate_with_biases_are_spread_over_both_servers():
    nbytes = loads(plan([5000, 10] * 20, 2).partitions, 2)
    assert max(nbytes) - min(nbytes) <= 20_000


def test_small_partitions_are_spread_by_their_number():
    partitions = plan([5000, *[1] * 30], 2).partitions
    counts = [sum(at.server == server for at in partitions) for server in range(2)]
    assert min(counts) > 10
