"""All systems of the benchmark train the same EMULATED network as it must be, in real processes."""

from tests.bench.engines.systems_rank import train


def test_all_systems_train_as_plain_averaging_does() -> None:
    systems = ["commsched", "dist_sync"]
    assert all(rank[system]["weights"] is not None for rank in train("mxnet", systems) for system in systems)
