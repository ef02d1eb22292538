"""Training on two hosts with two ranks each, in network namespaces; needs root."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from bench.harness.cluster import Cluster, ClusterUnavailable
from bench.harness.job import Job, run_job
from tests import warm

from .training import train_alone

RANKS = 4


@pytest.fixture(scope="module", autouse=True)
def _ranks_have_imported() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        warm.let_benchmarks_fork(patch, warm.NUMPY)
        yield


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    try:
        with Cluster(["probe"], "10gbit"):
            pass
    except ClusterUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("transport", "hierarchy", "more"),
    [
        ("ps", "off", {}),
        ("ps", "auto", {}),
        ("gloo", "auto", {"order": "static"}),
        ("mpi", "off", {}),
        ("mpi", "auto", {}),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else value,
)
def test_two_hosts_equal_plain_training(transport: str, hierarchy: str, more: dict[str, str]) -> None:
    if transport == "gloo":
        pytest.importorskip("torch.distributed")
    settings = {"transport": transport, "hierarchy": hierarchy, "partition": "600", "credit": "1200", **more}
    job = Job(RANKS, bandwidth="10gbit", ranks_per_host=2, settings=settings, timeout_seconds=300)
    by_rank = run_job(job, "tests.transports.training", {}).by_rank
    assert all(weights == by_rank[0] for weights in by_rank)
    np.testing.assert_allclose(by_rank[0], train_alone(RANKS), rtol=0, atol=1e-12)
