"""Training in real processes, over real transports."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

import commsched
from tests import warm
from tests.jobs.job import run_job

from .rank import TASKS
from .rank import train as train_rank
from .test_equality import OPTIMIZERS
from .training import Weights, require_equal, train_alone

SMALL = {"partition": "600", "credit": "1200"}

SHARDS = {"transport": "ps", "servers": []}  # each rank hosts one

#: The job has servers, which no other transport uses.
GLOO = {"transport": "gloo", "servers": []}

#: By name: system, task, and settings of its session. They follow each other in the same processes; the job has two servers.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "servers": ("commsched", "tied", {"transport": "ps", **SMALL}),
    "ps": ("commsched", "MLP", {**SHARDS, **SMALL}),
    "gloo": ("commsched", "MLP", {**GLOO, **SMALL}),
    "hierarchy": (
        "commsched",
        "TransformerEncoderLayer",
        {**GLOO, "policy": "fifo", "hierarchy": "on", **SMALL},
    ),
    "rsag": ("commsched", "LSTM", {**GLOO, "collective": "rsag", "order": "static", **SMALL}),
    "disabled": ("commsched", "MLP", {"disable": True}),
    "BatchNorm": ("commsched", "BatchNorm", {**SHARDS, **SMALL}),
    "BatchNorm by DDP": ("ddp", "BatchNorm", {}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Weights]]:
    """Each of two ranks' weights in each case."""
    out = tmp_path_factory.mktemp("trained") / "w"
    command = [sys.executable, "-m", "tests.plugins.torch.rank", str(out), *map(json.dumps, CASES.values())]
    code, _, err = run_job("-n", "2", "--servers", "2", "--", *command, imports=warm.TORCH)
    assert code == 0, err
    return {name: [torch.load(f"{out}.{number}.{rank}") for rank in range(2)] for number, name in enumerate(CASES)}


@pytest.mark.parametrize("case", ["servers", "ps", "gloo", "hierarchy", "rsag"])
def test_two_ranks_equal_plain_training(case: str, trained: dict[str, list[Weights]]) -> None:
    task = TASKS[CASES[case][1]]
    require_equal(trained[case], train_alone(task, OPTIMIZERS["SGD nesterov"], 2), task.tolerance)


def test_over_gloo_two_ranks_get_the_bits_of_the_parameter_server(trained: dict[str, list[Weights]]) -> None:
    """A sum of two has one order only."""
    for name, weights in trained["ps"][0].items():
        assert torch.equal(weights, trained["gloo"][0][name]), name


def test_batch_normalisation_keeps_statistics_local_as_ddp_does(trained: dict[str, list[Weights]]) -> None:
    ours, theirs = trained["BatchNorm"], trained["BatchNorm by DDP"]
    trained = [name for name in ours[0] if "running" not in name and "num_batches" not in name]
    for name in trained:
        assert torch.equal(ours[0][name], ours[1][name]), name
        for rank in range(2):
            assert torch.allclose(ours[rank][name], theirs[rank][name], rtol=1e-9, atol=1e-12), name
    assert not torch.equal(ours[0]["1.running_mean"], ours[1]["1.running_mean"])
    # DDP sends rank 0's statistics to all before each forward, so only rank 0's are those of its own batches.
    assert torch.allclose(ours[0]["1.running_mean"], theirs[0]["1.running_mean"], rtol=1e-9)


def require_bits_of_plain_torch(ours: Weights, ranks: int) -> None:
    for name, weights in train_rank("plain", "MLP", 0, ranks).items():
        assert torch.equal(ours[name], weights), name


def test_disabled_it_is_plain_torch_to_the_bit(trained: dict[str, list[Weights]]) -> None:
    require_bits_of_plain_torch(trained["disabled"][0], 2)


def test_alone_it_is_plain_torch_to_the_bit() -> None:
    with commsched.init():
        require_bits_of_plain_torch(train_rank("commsched", "MLP", 0, 1), 1)
