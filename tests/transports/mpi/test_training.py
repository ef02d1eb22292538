"""PyTorch training in ranks under mpiexec equals plain training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.plugins.torch.rank import TASKS
from tests.plugins.torch.test_equality import OPTIMIZERS
from tests.plugins.torch.training import require_equal, train_alone

from .launch import MPICH, run
from .training_rank import RUNS

SMALL = {"COMMSCHED_PARTITION": "600", "COMMSCHED_CREDIT": "1200"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [2, 3])
def test_training_equals_plain_training(ranks: int, tmp_path: Path) -> None:
    code, _, err = run(
        MPICH, ranks, "-m", "tests.transports.mpi.training_rank", str(ranks), str(tmp_path), **SMALL, timeout_seconds=100
    )
    assert code == 0, err
    for task, _ in RUNS[ranks]:
        by_rank = [torch.load(tmp_path / f"{task}.{rank}") for rank in range(ranks)]
        require_equal(by_rank, train_alone(TASKS[task], OPTIMIZERS["SGD nesterov"], ranks), TASKS[task].tolerance)
