"""Training in real processes, over real transports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.jobs.job import run_job

from .rank import TASKS
from .test_equality import OPTIMIZERS
from .training import Weights, require_equal, train_alone

pytestmark = pytest.mark.timeout(120)


def train(out: Path, system: str, task: str, *arguments: str, ranks: int = 2) -> list[Weights]:
    """Each rank's weights."""
    command = [sys.executable, "-m", "tests.plugins.torch.rank", system, task, str(out)]
    code, _, err = run_job("-n", str(ranks), *arguments, "--", *command, timeout_seconds=100)
    assert code == 0, err
    return [torch.load(f"{out}.{rank}") for rank in range(ranks)]


SMALL = ("--partition", "600", "--credit", "1200")


@pytest.mark.parametrize(
    ("task", "ranks", "servers"),
    [("MLP", 2, 0), ("MLP", 4, 0), ("TransformerEncoderLayer", 2, 2), ("tied", 4, 1), ("LSTM", 2, 0)],
)
def test_the_parameter_server_equals_plain_training(task: str, ranks: int, servers: int, tmp_path: Path) -> None:
    by_rank = train(tmp_path / "w", "commsched", task, "--servers", str(servers), *SMALL, ranks=ranks)
    require_equal(by_rank, train_alone(TASKS[task], OPTIMIZERS["SGD nesterov"], ranks), TASKS[task].tolerance)


@pytest.mark.parametrize(
    ("task", "ranks", "arguments"),
    [
        ("MLP", 2, ()),
        ("LSTM", 3, ("--policy", "rsag")),
        ("TransformerEncoderLayer", 2, ("--order", "static")),
        ("tied", 4, ("--policy", "rsag", "--order", "static")),
        ("MLP", 3, ("--policy", "fifo", "--hierarchy", "on")),
    ],
)
def test_gloo_equals_plain_training(task: str, ranks: int, arguments: tuple[str, ...], tmp_path: Path) -> None:
    by_rank = train(tmp_path / "w", "commsched", task, "--transport", "gloo", *arguments, *SMALL, ranks=ranks)
    require_equal(by_rank, train_alone(TASKS[task], OPTIMIZERS["SGD nesterov"], ranks), TASKS[task].tolerance)


def test_over_gloo_two_ranks_get_the_bits_of_the_parameter_server(tmp_path: Path) -> None:
    """A sum of two has one order only."""
    ours = [train(tmp_path / name, "commsched", "MLP", "--transport", name, *SMALL) for name in ("ps", "gloo")]
    for name, weights in ours[0][0].items():
        assert torch.equal(weights, ours[1][0][name]), name


def test_batch_normalisation_keeps_statistics_local_as_ddp_does(tmp_path: Path) -> None:
    ours = train(tmp_path / "ours", "commsched", "BatchNorm", *SMALL)
    theirs = train(tmp_path / "theirs", "ddp", "BatchNorm")
    trained = [name for name in ours[0] if "running" not in name and "num_batches" not in name]
    for name in trained:
        assert torch.equal(ours[0][name], ours[1][name]), name
        for rank in range(2):
            assert torch.allclose(ours[rank][name], theirs[rank][name], rtol=1e-9, atol=1e-12), name
    assert not torch.equal(ours[0]["1.running_mean"], ours[1]["1.running_mean"])
    # DDP sends rank 0's statistics to all before each forward, so only rank 0's are those of its own batches.
    assert torch.allclose(ours[0]["1.running_mean"], theirs[0]["1.running_mean"], rtol=1e-9)


@pytest.mark.parametrize("arguments", [("--disable", "1"), ()])
def test_disabled_or_alone_it_is_plain_torch_to_the_bit(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ranks = 2 if arguments else 1
    ours = train(tmp_path / "ours", "commsched", "MLP", *arguments, ranks=ranks)
    plain = train(tmp_path / "plain", "plain", "MLP", ranks=ranks)
    for name, weights in plain[0].items():
        assert torch.equal(ours[0][name], weights), name
