"""All systems of the benchmark train the same EMULATED network as it must be, in real processes."""

import pytest

from tests.bench.engines.systems_rank import train


@pytest.mark.parametrize("system", ["commsched", "pmean"])  # JAX begins as one of several processes, or does not
def test_a_system_trains_as_plain_averaging_does(system: str) -> None:
    assert all(rank[system]["weights"] is not None for rank in train("jax", [system]))
