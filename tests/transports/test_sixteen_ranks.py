"""Sixteen ranks on one machine train, over each transport, to the same weights."""

from __future__ import annotations

import numpy as np
import pytest

from bench.job import Job, run_job

from .training import Weights, train_alone

pytestmark = pytest.mark.timeout(180)
RANKS = 16
SETTINGS = {"partition": "2000", "credit": "4000", "join_within": "120", "fail_after": "40", "hierarchy": "off"}


def train(transport: str) -> Weights:
    """The weights, which are the same bits on all ranks."""
    job = Job(RANKS, settings={**SETTINGS, "transport": transport}, timeout_seconds=150.0)
    by_rank: list[Weights] = run_job(job, "tests.transports.training", {}).by_rank
    for rank, weights in enumerate(by_rank):
        assert weights == by_rank[0], f"rank {rank} has other weights than rank 0"
    return by_rank[0]


@pytest.fixture(scope="module")
def by_servers() -> Weights:
    weights = train("ps")
    np.testing.assert_allclose(weights, train_alone(RANKS), rtol=0, atol=1e-12)
    return weights


@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_collectives_give_the_bits_of_the_parameter_server(transport: str, by_servers: Weights) -> None:
    if transport == "gloo":
        pytest.importorskip("torch.distributed")
    assert train(transport) == by_servers
