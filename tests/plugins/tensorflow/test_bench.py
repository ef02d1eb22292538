"""All systems of the benchmark train the same EMULATED network, in real processes."""

from tests.bench.engines.systems_rank import train


def test_synchronous_systems_train_as_plain_averaging_does() -> None:
    systems = ["multi_worker_mirrored", "commsched"]  # collectives begin with the process
    assert all(rank[system]["weights"] is not None for rank in train("tensorflow", systems) for system in systems)


def test_a_worker_and_a_parameter_server_train() -> None:
    (rank,) = train("tensorflow", ["parameter_server"], ranks=1)  # with more it is the same, and each costs 5 s of processor
    assert rank["parameter_server"]["weights"] is None
