"""Sixteen ranks on one machine, over each transport, train the digits to the same weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

from bench.job import Job, run_job
from tests.jobs.job import ROOT

from .digits_rank import make_model
from .training import Weights

pytestmark = pytest.mark.timeout(180)
RANKS = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, labels and each rank's batches, as the examples have them."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import digits
    finally:
        sys.path.pop(0)
    images, labels, _, _ = digits.load()
    batches = [digits.batches(len(labels), 3, 8, rank, RANKS) for rank in range(RANKS)]
    path = tmp_path_factory.mktemp("digits") / "data.pt"
    torch.save((images, labels, batches), path)
    return path


def train(data: Path, out: Path, **settings: str) -> Weights:
    """The weights, which are the same bits on all ranks."""
    job = Job(
        RANKS,
        settings={
            "partition": "8000",
            "credit": "16000",
            "join_within": "120",
            "fail_after": "40",
            "hierarchy": "off",
            **settings,
        },
        timeout_seconds=150.0,
    )
    run_job(job, "tests.plugins.torch.digits_rank", {"data": str(data), "out": str(out)})
    by_rank: list[Weights] = [torch.load(f"{out}.{rank}") for rank in range(RANKS)]
    for rank, weights in enumerate(by_rank):
        for name, tensor in weights.items():
            assert torch.equal(tensor, by_rank[0][name]), f"'{name}' differs between rank 0 and rank {rank}"
    return by_rank[0]


@pytest.fixture(scope="module")
def by_servers(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    weights = train(data, tmp_path_factory.mktemp("ps") / "w", transport="ps")
    initial = make_model().state_dict()
    assert not any(torch.allclose(weights[name], initial[name]) for name in weights), "nothing was learnt"
    return weights


@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_collectives_give_the_bits_of_the_parameter_server(
    transport: str, data: Path, by_servers: Weights, tmp_path: Path
) -> None:
    ours = train(data, tmp_path / "w", transport=transport)
    for name, tensor in by_servers.items():
        assert torch.equal(ours[name], tensor), name
