"""Training in real processes, over real transports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import commsched
from tests.jobs.job import run_job

from .rank import TASKS
from .rank import train as train_rank
from .test_equality import OPTIMIZERS
from .training import Weights, require_equal, train_alone

pytestmark = pytest.mark.timeout(120)

SMALL = {"partition": "600", "credit": "1200"}

#: By name: system, task, and settings of its session. Those of one job follow each other in the same processes.
Cases = dict[str, tuple[str, str, dict[str, Any]]]

#: Without servers each rank hosts a shard.
OF_TWO: Cases = {
    "ps": ("commsched", "MLP", {"transport": "ps", **SMALL}),
    "gloo": ("commsched", "MLP", {"transport": "gloo", **SMALL}),
    "hierarchy": (
        "commsched",
        "TransformerEncoderLayer",
        {"transport": "gloo", "policy": "fifo", "hierarchy": "on", **SMALL},
    ),
    "disabled": ("commsched", "MLP", {"disable": True}),
    "BatchNorm": ("commsched", "BatchNorm", SMALL),
    "BatchNorm by DDP": ("ddp", "BatchNorm", {}),
}
#: With two servers.
OF_THREE: Cases = {
    "servers": ("commsched", "tied", {"transport": "ps", **SMALL}),
    "rsag": ("commsched", "LSTM", {"transport": "gloo", "policy": "rsag", "order": "static", **SMALL}),
}


def train(out: Path, ranks: int, cases: Cases, *arguments: str) -> dict[str, list[Weights]]:
    """Each rank's weights in each case."""
    command = [sys.executable, "-m", "tests.plugins.torch.rank", str(out), *map(json.dumps, cases.values())]
    code, _, err = run_job("-n", str(ranks), *arguments, "--", *command, timeout_seconds=100)
    assert code == 0, err
    return {name: [torch.load(f"{out}.{number}.{rank}") for rank in range(ranks)] for number, name in enumerate(cases)}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Weights]]:
    return train(tmp_path_factory.mktemp("two") / "w", 2, OF_TWO)


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Weights]]:
    return train(tmp_path_factory.mktemp("three") / "w", 3, OF_THREE, "--servers", "2")


def require_plain(by_rank: list[Weights], task: str) -> None:
    require_equal(by_rank, train_alone(TASKS[task], OPTIMIZERS["SGD nesterov"], len(by_rank)), TASKS[task].tolerance)


@pytest.mark.parametrize("case", ["ps", "gloo", "hierarchy"])
def test_two_ranks_equal_plain_training(case: str, of_two: dict[str, list[Weights]]) -> None:
    require_plain(of_two[case], OF_TWO[case][1])


@pytest.mark.parametrize("case", OF_THREE)
def test_three_ranks_equal_plain_training(case: str, of_three: dict[str, list[Weights]]) -> None:
    require_plain(of_three[case], OF_THREE[case][1])


def test_over_gloo_two_ranks_get_the_bits_of_the_parameter_server(of_two: dict[str, list[Weights]]) -> None:
    """A sum of two has one order only."""
    for name, weights in of_two["ps"][0].items():
        assert torch.equal(weights, of_two["gloo"][0][name]), name


def test_batch_normalisation_keeps_statistics_local_as_ddp_does(of_two: dict[str, list[Weights]]) -> None:
    ours, theirs = of_two["BatchNorm"], of_two["BatchNorm by DDP"]
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


def test_disabled_it_is_plain_torch_to_the_bit(of_two: dict[str, list[Weights]]) -> None:
    require_bits_of_plain_torch(of_two["disabled"][0], 2)


def test_alone_it_is_plain_torch_to_the_bit() -> None:
    with commsched.init():
        require_bits_of_plain_torch(train_rank("commsched", "MLP", 0, 1), 1)
