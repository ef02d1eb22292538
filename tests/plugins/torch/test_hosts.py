"""PyTorch on two hosts with two ranks each, in network namespaces; needs root. See tests/transports/test_hosts.py too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.cluster import Cluster, ClusterUnavailable
from bench.job import Job, run_job

from .rank import TASKS
from .test_equality import OPTIMIZERS
from .training import require_equal, train_alone

pytestmark = pytest.mark.timeout(120)
RANKS = 4


def test_two_hosts_equal_plain_training(tmp_path: Path) -> None:
    try:
        with Cluster(["probe"], "10gbit"):
            pass
    except ClusterUnavailable as error:
        pytest.skip(str(error))
    settings = {"transport": "gloo", "order": "static", "partition": "600", "credit": "1200"}
    job = Job(RANKS, bandwidth="10gbit", ranks_per_host=2, settings=settings, timeout_seconds=100.0)
    run_job(job, "tests.plugins.torch.rank", {"task": "MLP", "out": str(tmp_path / "w")})
    by_rank = [torch.load(tmp_path / f"w.{rank}") for rank in range(RANKS)]
    require_equal(by_rank, train_alone(TASKS["MLP"], OPTIMIZERS["SGD nesterov"], RANKS), TASKS["MLP"].tolerance)
