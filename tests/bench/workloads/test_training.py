"""Emulated workloads in training: with the scheduler they give what plain averaging gives. ``bench train`` compares REAL ones,
and DDP."""

from __future__ import annotations

import pytest
import torch

from bench.workloads import Workload, load_profile, make_workload
from commsched import SchedulerConfig
from commsched.plugins.torch import ScheduledOptimizer
from commsched.session.local import local_sessions
from commsched.testing import Delayed, run_world
from tests.bench.workloads.training import average_plainly, largest_difference, make_optimizer, train_rank, weights

RANKS = 2


def emulated(model: str) -> Workload:
    """Its layers together sleep for 20 ms a step."""
    profile = load_profile(model)
    scaled = profile.scaled(nbytes=1e-3, seconds=0.02 / profile.compute_seconds)
    return make_workload({"kind": "emulated", "profile": scaled.to_record()}, RANKS)


def train_scheduled(workload: Workload) -> list[list[torch.Tensor]]:
    """Each rank's weights. The ranks are threads; sends and averages are delayed, so that forward has to wait."""

    def train(rank: int) -> list[torch.Tensor]:
        with sessions[rank] as session:
            model = workload.make_model()
            optimizer = ScheduledOptimizer(make_optimizer(model), model, session=session)
            train_rank(workload, model, optimizer, rank)
            optimizer.synchronize()
            return weights(model)

    config = SchedulerConfig(partition_bytes=2000, credit_bytes=4000)
    sessions = local_sessions(RANKS, config, wrap_transport=lambda transport: Delayed(transport, transport.rank, 1e-4))
    return run_world(RANKS, train, timeout_seconds=300)


@pytest.mark.parametrize("name", ["uniform", "bert-base"])
def test_the_scheduler_gates_the_emulated_model(name: str) -> None:
    workload = emulated(name)
    reference = average_plainly(workload.untimed(), RANKS)
    for ours in train_scheduled(workload):
        assert largest_difference(ours, reference, workload) < 1e-5
