"""Training in real processes, over real transports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.jobs.job import run_job

from .rank import TASKS
from .rank import train as train_rank
from .test_equality import OPTIMIZERS
from .training import Weights, require_equal, train_alone

pytestmark = pytest.mark.timeout(120)


def train(out: Path, systems: str, task: str, *arguments: str, ranks: int = 2) -> list[list[Weights]]:
    """Each rank's weights, for each of the systems."""
    command = [sys.executable, "-m", "tests.plugins.torch.rank", systems, task, str(out)]
    code, _, err = run_job("-n", str(ranks), *arguments, "--", *command, timeout_seconds=100)
    assert code == 0, err
    return [[torch.load(f"{out}.{system}.{rank}") for rank in range(ranks)] for system in systems.split(",")]


SMALL = ("--partition", "600", "--credit", "1200")


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """As in the ranks of jobs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def require_plain(by_rank: list[Weights], task: str) -> None:
    require_equal(by_rank, train_alone(TASKS[task], OPTIMIZERS["SGD nesterov"], len(by_rank)), TASKS[task].tolerance)


@pytest.fixture(scope="module")
def over_ps(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """Two ranks, each of which hosts a shard."""
    (by_rank,) = train(tmp_path_factory.mktemp("ps") / "w", "commsched", "MLP", "--transport", "ps", *SMALL)
    return by_rank


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    (by_rank,) = train(tmp_path_factory.mktemp("gloo") / "w", "commsched", "MLP", "--transport", "gloo", *SMALL)
    return by_rank


def test_the_parameter_server_equals_plain_training(over_ps: list[Weights]) -> None:
    require_plain(over_ps, "MLP")


def test_gloo_equals_plain_training(over_gloo: list[Weights]) -> None:
    require_plain(over_gloo, "MLP")


def test_over_gloo_two_ranks_get_the_bits_of_the_parameter_server(over_ps: list[Weights], over_gloo: list[Weights]) -> None:
    """A sum of two has one order only."""
    for name, weights in over_ps[0].items():
        assert torch.equal(weights, over_gloo[0][name]), name


@pytest.mark.parametrize(
    ("task", "ranks", "arguments"),
    [
        ("tied", 3, ("--transport", "ps", "--servers", "2")),
        ("LSTM", 3, ("--transport", "gloo", "--policy", "rsag", "--order", "static")),
        ("TransformerEncoderLayer", 2, ("--transport", "gloo", "--policy", "fifo", "--hierarchy", "on")),
    ],
)
def test_other_ways_equal_plain_training(task: str, ranks: int, arguments: tuple[str, ...], tmp_path: Path) -> None:
    (by_rank,) = train(tmp_path / "w", "commsched", task, *arguments, *SMALL, ranks=ranks)
    require_plain(by_rank, task)


def test_batch_normalisation_keeps_statistics_local_as_ddp_does(tmp_path: Path) -> None:
    ours, theirs = train(tmp_path / "w", "commsched,ddp", "BatchNorm", *SMALL)
    trained = [name for name in ours[0] if "running" not in name and "num_batches" not in name]
    for name in trained:
        assert torch.equal(ours[0][name], ours[1][name]), name
        for rank in range(2):
            assert torch.allclose(ours[rank][name], theirs[rank][name], rtol=1e-9, atol=1e-12), name
    assert not torch.equal(ours[0]["1.running_mean"], ours[1]["1.running_mean"])
    # DDP sends rank 0's statistics to all before each forward, so only rank 0's are those of its own batches.
    assert torch.allclose(ours[0]["1.running_mean"], theirs[0]["1.running_mean"], rtol=1e-9)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(("ranks", "arguments"), [(2, ("--disable", "1")), (1, ())])
def test_disabled_or_alone_it_is_plain_torch_to_the_bit(ranks: int, arguments: tuple[str, ...], tmp_path: Path) -> None:
    (ours,) = train(tmp_path / "w", "commsched", "MLP", *arguments, ranks=ranks)
    for name, weights in train_rank("plain", "MLP", 0, ranks).items():
        assert torch.equal(ours[0][name], weights), name
